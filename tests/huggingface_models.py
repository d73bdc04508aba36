"""Small random Hugging Face models, and a wrapper with the interface that generation needs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from lmhead import LMHead

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")


def llama(vocab: int = 60) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocab,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        )
    )


def gpt2(vocab: int = 60) -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=vocab,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=128,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
    )


FAMILIES = {"llama": llama, "gpt2": gpt2}


def random_model(family: str, seed: int = 0, sharpness: float = 25.0) -> Any:
    """A model whose distributions have a few likely tokens, as those of trained models do."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().double().eval()
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    return model


def written_model() -> Any:
    """A Llama whose weights follow from a formula, so that results can be written down."""
    model = llama().eval()
    with torch.no_grad():
        for place, (_, p) in enumerate(sorted(model.named_parameters())):
            if p.dim() == 2:
                steps = torch.arange(p.numel(), dtype=torch.float64).reshape(p.shape)
                p.copy_((steps * (1.7 + 0.13 * place) + place).sin() / p.shape[1] ** 0.5)
        model.lm_head.weight *= 3
    return model


class WrappedCache:
    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def select(self, rows: Tensor) -> WrappedCache:
        self.cache.batch_select_indices(rows)
        return self


class Wrapped:
    """A Hugging Face model as a `Model`; `lazy` puts our head on it."""

    tokenizer = None

    def __init__(self, model: Any, *, eos: tuple[int, ...] = (), lazy: bool = True) -> None:
        self.base, self.eos_token_ids = model.base_model, eos
        self.head: Any = LMHead.from_linear(model.lm_head) if lazy else model.lm_head
        self.rows: list[int] = []  # how many rows each call of the body had

    def body(
        self, ids: Tensor, cache: WrappedCache | None, mask: Tensor
    ) -> tuple[Tensor, WrappedCache]:
        self.rows.append(len(ids))
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.base(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=None if cache is None else cache.cache,
            use_cache=True,
        )
        return out.last_hidden_state, WrappedCache(out.past_key_values)
