"""Llama models in the Hugging Face format, opened without transformers.

A configuration that asks for more than `LlamaConfig` has (biases, another activation, rotary
positions that `rotary` does not know) is left to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.errors import ModelError
from lmhead.head import LMHead
from lmhead.models.model_files import MAX_LAYERS, Fields, TensorHeader, check_tensors, read_tensors
from lmhead.models.rotary import divisors, is_known, read_rotary
from lmhead.nn import LlamaBody, LlamaConfig
from lmhead.nn.decode_step import attach_step

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# Hugging Face's names of a block's parts, and ours.
PARTS = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.gate_proj": "feed_forward.gate",
    "mlp.up_proj": "feed_forward.up",
    "mlp.down_proj": "feed_forward.down",
}
_ABSENT: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "hidden_act": (None, "silu"),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
}


def is_plain(config: Fields) -> bool:
    """Return whether a `config.json` describes a Llama that `LlamaBody` computes."""
    plain = all(config.values.get(name) in values for name, values in _ABSENT.items())
    return config.values.get("model_type") == "llama" and plain and is_known(read_rotary(config))


def read_sizes(config: Fields, tensors: Mapping[str, TensorHeader], where: Path) -> LlamaConfig:
    """Return the sizes, with transformers' defaults, checked against the tensors of the folder."""
    # The shapes are compared before anything is allocated or looped over by these numbers.
    layers = config.integer("num_hidden_layers", 32, low=1, high=min(MAX_LAYERS, len(tensors)))
    heads = config.integer("num_attention_heads", 32, low=1)
    size = config.integer("hidden_size", 4096, low=1)
    if "head_dim" not in config and size % heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads, {heads}")
    d = config.integer("head_dim", size // heads, low=1)
    groups = config.integer("num_key_value_heads", heads, low=1)
    inner = config.integer("intermediate_size", 11008, low=1)
    vocab = config.integer("vocab_size", 32000, low=1)
    shapes = {
        "input_layernorm": (size,),
        "self_attn.q_proj": (heads * d, size),
        "self_attn.k_proj": (groups * d, size),
        "self_attn.v_proj": (groups * d, size),
        "self_attn.o_proj": (size, heads * d),
        "post_attention_layernorm": (size,),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, size),
        "model.norm.weight": (size,),
    }
    for i in range(layers):
        expected |= {f"model.layers.{i}.{part}.weight": shape for part, shape in shapes.items()}
    if not config.flag("tie_word_embeddings", False):
        expected["lm_head.weight"] = (vocab, size)
    check_tensors(where, tensors, expected)
    rotary = read_rotary(config)
    try:
        return LlamaConfig(
            vocab_size=vocab,
            hidden_size=size,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            head_dim=d,
            rope_theta=rotary.number("rope_theta"),
            rope_factors=divisors(rotary, d),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        )
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{config.path} must describe a Llama: {error}") from error


def load(
    folder: Path, config: Fields, tensors: Mapping[str, TensorHeader]
) -> tuple[LlamaBody, LMHead]:
    """Return the body and the head, on the tensors of the files."""
    sizes = read_sizes(config, tensors, folder)
    names = {"model.embed_tokens": "embedding", "model.norm": "norm"} | {
        f"model.layers.{i}.{theirs}": f"blocks.{i}.{ours}"
        for i in range(sizes.num_hidden_layers)
        for theirs, ours in PARTS.items()
    }
    renamed = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in names.items()}
    if not config.flag("tie_word_embeddings", False):
        renamed["lm_head.weight"] = "lm_head"
    state = {renamed[name]: tensor for name, tensor in _map(tensors, renamed, config).items()}
    weight = state.pop("lm_head", None)
    return build_llama(sizes, state, weight)


def build_llama(
    sizes: LlamaConfig, state: dict[str, Tensor], weight: Tensor | None
) -> tuple[LlamaBody, LMHead]:
    """Return a body and a head on these tensors, frozen; without a weight the head is tied."""
    with torch.device("meta"):
        # (From a tensor: to initialise an embedding on the meta device, torch loads its compiler.)
        embedding: nn.Embedding = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            torch.empty(sizes.vocab_size, sizes.hidden_size)
        )
        body = LlamaBody(sizes, embedding=embedding)
    body.load_state_dict(state, assign=True)
    body.requires_grad_(False).eval()
    attach_step(body)
    if weight is None:
        return body, LMHead.tied(body.embedding)
    head = LMHead(sizes.hidden_size, sizes.vocab_size, device="meta")
    head.load_state_dict({"weight": weight}, assign=True)
    return body, head.requires_grad_(False)


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory is aligned to its dtype, by a copy if need be.

    A safetensors file may have a header of any length, and its data is mapped where it is.
    """
    return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor


def _map(
    tensors: Mapping[str, TensorHeader], names: Mapping[str, str], config: Fields
) -> dict[str, Tensor]:
    """Return the named tensors, memory-mapped; of one dtype, if need be by conversion."""
    mapped: dict[str, Tensor] = {}
    for path in sorted({tensors[name].path for name in names}):
        names_in_file = [name for name in names if tensors[name].path == path]
        mapped |= {
            name: aligned(tensor) for name, tensor in read_tensors(path, names_in_file).items()
        }
    dtypes = {tensor.dtype for tensor in mapped.values()}
    if len(dtypes) == 1:
        return mapped
    # As transformers does: the dtype of the configuration for all, else the widest in the files.
    wanted = config.text("dtype", config.text("torch_dtype", ""))
    dtype = _DTYPES.get(wanted) or reduce(torch.promote_types, dtypes)
    return {name: tensor.to(dtype) for name, tensor in mapped.items()}
