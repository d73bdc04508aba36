"""Llamas in GGUF files: llama.cpp's names and order of numbers, as Hugging Face has them.

In:  a `GgufFile`.
Out: `config.json` as a dictionary, and the tensors in float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import ModelError
from lmhead.models.gguf_file import GgufFile

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DIVISORS = "rope_freqs.weight"  # of the angles of rotary positions, from Llama 3.1 on


def is_plain_llama(file: GgufFile) -> bool:
    """A Llama with the tensors that every Llama has, and no others."""
    if file.entries.get("general.architecture") != "llama":
        return False
    _check_rotary(file)
    layers = range(int(file.entries.get("llama.block_count", 0)))
    blocks = {f"blk.{i}.{part}.weight" for i in layers for part in _PARTS}
    around = {"token_embd.weight", "output_norm.weight"}
    return set(file.tensors) - {"output.weight", _DIVISORS} == blocks | around


def read_llama(file: GgufFile) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors, as Hugging Face names them.

    Raises:
        ModelError: an entry or a tensor is missing, or makes no sense.
    """

    def entry(name: str, default: Any = None) -> Any:
        found = file.entries.get(f"llama.{name}", default)
        if found is None:
            raise ModelError(f"{file.path} does not say llama.{name}: it is damaged")
        return found

    def read(name: str) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(file.read(name)))

    heads = int(entry("attention.head_count"))
    groups = int(entry("attention.head_count_kv", heads))
    tensors = {
        "model.embed_tokens.weight": read("token_embd.weight"),
        "model.norm.weight": read("output_norm.weight"),
    }
    if "output.weight" in file.tensors:
        tensors["lm_head.weight"] = read("output.weight")
    for i in range(int(entry("block_count"))):
        for part, theirs in _PARTS.items():
            tensor = read(f"blk.{i}.{part}.weight")
            if part in ("attn_q", "attn_k"):
                tensor = _half_by_half(tensor, heads if part == "attn_q" else groups)
            tensors[f"model.layers.{i}.{theirs}.weight"] = tensor
    vocab, size = tensors["model.embed_tokens.weight"].shape
    head_dim = int(entry("attention.key_length", size // heads))
    if int(entry("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError(
            f"{file.path} turns only a part of each head, which lmhead does not read from GGUF. "
            "Open the model's folder in the format of Hugging Face instead"
        )
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": size,
        "intermediate_size": int(entry("feed_forward_length")),
        "num_hidden_layers": int(entry("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "max_position_embeddings": int(entry("context_length")),
        "rms_norm_eps": float(entry("attention.layer_norm_rms_epsilon")),
        "rope_parameters": _rotary(file, float(entry("rope.freq_base", 10000.0)), head_dim),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "dtype": "float32",
    }
    return config, tensors


def _check_rotary(file: GgufFile) -> None:
    """Refuse a Llama whose positions are scaled in a way that would be lost."""
    kind = file.entries.get("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(
            f"{file.path} is a Llama whose rotary positions are scaled by {kind!r}, which lmhead "
            "does not read from GGUF. Open the model's folder in the format of Hugging Face instead"
        )


def _rotary(file: GgufFile, theta: float, size: int) -> dict[str, Any]:
    """The rotary positions of heads of a size, as `config.json` has them: see `rotary`."""
    factor = 1.0
    if file.entries.get("llama.rope.scaling.type") == "linear":
        factor = float(file.entries.get("llama.rope.scaling.factor", 1.0))
    factor = float(file.entries.get("llama.rope.scale_linear", factor))  # of older files
    if _DIVISORS not in file.tensors:
        kind = (
            {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        )
        return {**kind, "rope_theta": theta}
    divisors = (file.read(_DIVISORS).astype(np.float64) * factor).reshape(-1).tolist()
    if len(divisors) != size // 2 or not all(0 < x < np.inf for x in divisors):
        raise ModelError(
            f"{file.path} is damaged: {_DIVISORS} must be {size // 2} numbers above 0, one for "
            f"each pair of a head's coordinates; got {len(divisors)}"
        )
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": int(file.entries["llama.context_length"]),
    }


def _half_by_half(weight: Tensor, heads: int) -> Tensor:
    """From llama.cpp's order, where rows 2i and 2i + 1 of a head are a pair, to i and i + d/2."""
    rows, size = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, size)
    return pairs.transpose(1, 2).reshape(rows, size).contiguous()
