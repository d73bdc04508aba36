"""Tiny random Hugging Face models, one for each way a model can end."""

from __future__ import annotations

import copy
import functools
import os
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

VOCAB = 64
WIDE_VOCAB = 1031
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _llama(**more: Any) -> Any:
    config = transformers.LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **more})
    return transformers.LlamaForCausalLM(config)


def _gemma2() -> Any:
    """Soft-capping after the head, and tied weights."""
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, final_logit_softcapping=5.0, query_pre_attn_scalar=8)
    )


def _cohere() -> Any:
    return transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES, logit_scale=0.25))


def _gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=16,
            n_inner=24,
            n_layer=2,
            n_head=2,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )


def _seq2seq(name: str) -> Any:
    return getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=64,
        dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )


def _bart() -> Any:
    """Adds `final_logits_bias` of shape (1, V)."""
    model = transformers.BartForConditionalGeneration(_seq2seq("Bart"))
    model.final_logits_bias.normal_()
    return model


def _t5(tied: bool) -> Any:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _llava() -> Any:
    text = transformers.LlamaConfig(**SIZES)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=3, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


FAMILIES = {
    "llama": _llama,
    "llama tied": lambda: _llama(tie_word_embeddings=True),
    "gpt2": _gpt2,
    "gemma2": _gemma2,
    "cohere": _cohere,
    "bart": _bart,
    "t5": lambda: _t5(True),
    "t5 untied": lambda: _t5(False),
    "llava": _llava,
}
SEQ2SEQ = {"bart", "t5", "t5 untied"}


@functools.cache
def _original(family: str, sharpness: float) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = FAMILIES[family]().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)  # peaked, as a trained model is
    return model


def tiny(family: str = "llama", *, sharpness: float = 20.0) -> Any:
    """Return a fresh model, always with the same weights."""
    return copy.deepcopy(_original(family, sharpness))


def wide(*, sharpness: float = 20.0) -> Any:
    """Return a Llama whose vocabulary is large next to everything else in it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"vocab_size": WIDE_VOCAB, "hidden_size": 8, "head_dim": 4}
        model = _llama(**sizes, intermediate_size=12, num_hidden_layers=1).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


def batch(rows: int = 3, length: int = 9, *, seed: int = 0) -> dict[str, Any]:
    """Return input ids, an attention mask and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, : length // 3] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
