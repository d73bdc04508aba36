"""`transformers.Trainer` with `torch_compile=True`: inductor's own code, equal to the eager run.

A program of its own: compiling changes the state of accelerate, and needs a process in which
nothing has imported distutils.

    python -m integrations.test_compiled_trainer FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close

import lmhead
from integrations.clients import trainer
from integrations.tiny_hf import WIDE_VOCAB, transformers


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WIDE_VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=0,  # a layer has nine more C++ files to compile
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return lmhead.replace_head(transformers.LlamaForCausalLM(config))


def compare(cache: Path) -> None:
    """Train both, and compare losses and weights."""
    runs = []
    for compiled in (False, True):
        made = model()
        run = trainer(made, max_steps=2, torch_compile=compiled)
        run.train()
        losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        runs.append((losses, [p.detach() for p in made.parameters()]))
    (expected, weights), (losses, ours) = runs
    assert list(cache.rglob("*.cpp")), "nothing was compiled"
    assert losses == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(ours, weights, strict=True):
        assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_inductor_trains_as_eager(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "integrations.test_compiled_trainer", str(tmp_path)],
        cwd=Path(__file__).resolve().parents[1],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of inductor, about its own code
    compare(Path(sys.argv[1]))
