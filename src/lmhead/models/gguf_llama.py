"""Llama models in GGUF files, with the names and the order of rows that Hugging Face uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmhead.errors import ModelError
from lmhead.models.gguf_file import GgufFile
from lmhead.models.llama_folder import PARTS, read_sizes
from lmhead.models.model_files import MAX_LAYERS, Fields, TensorHeader
from lmhead.nn.decode_step import BLOCK_TYPES, StoredBlocks
from lmhead.progress import report_read

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
    """Return whether a file holds a Llama with the tensors that every Llama has, and no others."""
    if file.metadata.values.get("general.architecture") != "llama":
        return False
    kind = file.metadata.text("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(
            f"{file.path}: llama.rope.scaling.type must be none or linear to be read from GGUF; "
            f"got {kind!r}. Open the model's Hugging Face folder instead"
        )
    return set(file.tensors) - {"output.weight", _DIVISORS} == set(_names(file))


def _names(file: GgufFile) -> dict[str, str]:
    """Return the tensors of a Llama: GGUF's names to Hugging Face's."""
    high = min(MAX_LAYERS, len(file.tensors))
    layers = file.metadata.integer("llama.block_count", low=1, high=high)
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    } | {
        f"blk.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
        for i in range(layers)
        for ours, theirs in _PARTS.items()
    }


def read_llama(file: GgufFile) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the tensors, as Hugging Face names them."""
    fields, names = file.metadata, _names(file)
    if "output.weight" in file.tensors:
        names["output.weight"] = "lm_head.weight"
    headers = {
        theirs: TensorHeader(file.path, file.tensors[ours].shape, "F32")
        for ours, theirs in names.items()
    }
    embedding = headers["model.embed_tokens.weight"].shape
    if len(embedding) != 2:
        raise ModelError(f"{file.path}: token_embd.weight must have 2 dimensions; got {embedding}")
    vocab, size = embedding
    heads = fields.integer("llama.attention.head_count", low=1, high=size)
    groups = fields.integer("llama.attention.head_count_kv", heads, low=1, high=heads)
    if "llama.attention.key_length" not in fields and size % heads:
        raise fields.error("llama.attention.head_count", f"a divisor of {size}, the hidden size")
    head_dim = fields.integer("llama.attention.key_length", size // heads, low=2, high=2**16)
    if fields.integer("llama.rope.dimension_count", head_dim) != head_dim:
        raise fields.error(
            "llama.rope.dimension_count", f"{head_dim}, the whole head, to be read from GGUF"
        )
    length = fields.integer("llama.context_length", low=1)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": size,
        "intermediate_size": fields.integer("llama.feed_forward_length", low=1),
        "num_hidden_layers": fields.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "max_position_embeddings": length,
        "rms_norm_eps": fields.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rotary(file, head_dim, length),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32",
    }
    read_sizes(Fields(file.path, config), headers, file.path)
    tensors, done, total = {}, 0, sum(file.tensors[ours].nbytes for ours in names)
    for ours, theirs in names.items():
        tensor = torch.from_numpy(np.ascontiguousarray(file.read(ours)))
        if ".attn_q." in ours or ".attn_k." in ours:
            tensor = _half_by_half(tensor, heads if ".attn_q." in ours else groups)
        tensors[theirs] = tensor
        done += file.tensors[ours].nbytes
        report_read(file.path.name, done, total)
    return config, tensors


def read_blocks(file: GgufFile) -> dict[str, StoredBlocks]:
    """Return the matrices of the layers that are stored in blocks, by the names of `LlamaBody`."""
    heads = file.metadata.integer("llama.attention.head_count", low=1)
    groups = file.metadata.integer("llama.attention.head_count_kv", heads, low=1)
    blocks = {}
    for name, tensor in file.tensors.items():
        layer, _, part = name.removeprefix("blk.").removesuffix(".weight").partition(".")
        ours = PARTS.get(_PARTS.get(part, ""), "")
        if tensor.kind.name not in BLOCK_TYPES or len(tensor.shape) != 2 or not ours:
            continue
        data = torch.from_numpy(file.bytes_of(name).reshape(tensor.shape[0], -1).copy())
        if part in ("attn_q", "attn_k"):
            data = _half_by_half(data, heads if part == "attn_q" else groups)
        blocks[f"blocks.{layer}.{ours}.weight"] = StoredBlocks(tensor.kind.name, data)
    return blocks


def _rotary(file: GgufFile, size: int, length: int) -> dict[str, Any]:
    """Return `rope_parameters` of config.json for heads of a size: see `rotary`."""
    fields = file.metadata
    theta = fields.number("llama.rope.freq_base", 10000.0)
    factor = 1.0
    if fields.values.get("llama.rope.scaling.type") == "linear":
        factor = fields.number("llama.rope.scaling.factor", 1.0)
    factor = fields.number("llama.rope.scale_linear", factor)  # in older files
    if _DIVISORS not in file.tensors:
        kind = (
            {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        )
        return {**kind, "rope_theta": theta}
    if file.tensors[_DIVISORS].shape != (size // 2,):
        raise ModelError(
            f"{file.path}: {_DIVISORS} must have shape {(size // 2,)}, one number for each pair of "
            f"a head's coordinates; got {file.tensors[_DIVISORS].shape}"
        )
    divisors = (file.read(_DIVISORS).astype(np.float64) * factor).tolist()
    if not all(0 < x < np.inf for x in divisors):
        raise ModelError(f"{file.path}: {_DIVISORS} must hold finite numbers above 0")
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": length,
    }


def _half_by_half(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows from llama.cpp's pairs 2i, 2i + 1 of a head to i, i + d/2."""
    rows, size = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, size)
    return pairs.transpose(1, 2).reshape(rows, size).contiguous()
