"""A small random Llama with `nn.Linear` or `LMHead` as output layer, and a tokenizer for it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from lmhead import LMHead

VOCAB = 64


@functools.cache
def _llama(seed: int, vocab: int) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)  # peaked, as a trained model is
    return model


def llama(kind: str, seed: int = 0, vocab: int = VOCAB) -> Any:
    """A fresh model; "lazy" replaces the output layer."""
    original = _llama(seed, vocab)
    model = type(original)(original.config).eval()
    model.load_state_dict(original.state_dict())
    model.generation_config = original.generation_config
    if kind == "lazy":
        model.lm_head = LMHead.from_linear(model.lm_head)
    return model


@functools.cache
def tokenizer() -> Any:
    """One token per word: t4 to t63."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"t{i}" for i in range(4, VOCAB))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    cut = Tokenizer(model)
    cut.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=cut,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
