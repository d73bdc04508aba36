"""A model of transformers that takes a cache but makes none: all tokens are processed again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close

from lmhead import generate
from lmhead.models import load_huggingface
from models import hf_folders

IDS = torch.tensor([[1, 70, 8, 260, 33, 9, 9, 120], [1, 5, 261, 44, 17, 99, 30, 262]])


def test_tokens_are_processed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon H1 of transformers 5.0 returns None where it was given no cache."""
    hf_folders.write(tmp_path)
    model: Any = load_huggingface(tmp_path, direct=False)
    whole, _ = model.hidden(IDS)
    text = generate(model, "ab", max_new_tokens=6).text
    forward = model.body.base.forward

    def without(input_ids: Any = None, past_key_values: Any = None, **options: Any) -> Any:
        assert past_key_values is None
        out = forward(input_ids=input_ids, **options)
        out.past_key_values = None
        return out

    monkeypatch.setattr(model.body.base, "forward", without)
    _, cache = model.hidden(IDS[:, :5])
    rest, cache = model.hidden(IDS[:, 5:], cache)
    assert cache.length == 8
    assert_close(rest, whole[:, 5:], atol=1e-5)
    assert generate(model, "ab", max_new_tokens=6).text == text
