"""Llamas in the format of Hugging Face, opened without transformers.

In:  the configuration and the safetensors files of a folder.
Out: a `LlamaBody` and the head on it, on tensors that are mapped, not read: opening takes a moment.

Only plain ones: what the configuration asks for beyond `LlamaConfig` (biases, another activation,
rotary positions that `rotary` does not know) is left to transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lmhead.errors import ModelError
from lmhead.head import LMHead
from lmhead.models.rotary import divisors, is_known, read_rotary
from lmhead.nn import LlamaBody, LlamaConfig

# Their names of a block's parts, and ours.
_PARTS = {
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


def is_plain(config: dict[str, Any]) -> bool:
    """Whether a `config.json` describes a Llama that `LlamaBody` computes."""
    plain = all(config.get(name) in values for name, values in _ABSENT.items())
    return config.get("model_type") == "llama" and plain and is_known(read_rotary(config))


def read_config(config: dict[str, Any]) -> LlamaConfig:
    """The sizes, with the defaults of transformers where the file is silent."""
    heads = config.get("num_attention_heads", 32)
    size = config.get("hidden_size", 4096)
    rotary = read_rotary(config)
    return LlamaConfig(
        vocab_size=config.get("vocab_size", 32000),
        hidden_size=size,
        intermediate_size=config.get("intermediate_size", 11008),
        num_hidden_layers=config.get("num_hidden_layers", 32),
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim"),
        rope_theta=float(rotary["rope_theta"]),
        rope_factors=divisors(rotary, config.get("head_dim") or size // heads),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
    )


def load(folder: Path, config: dict[str, Any], files: list[Path]) -> tuple[LlamaBody, LMHead]:
    """The body and the head, on the tensors of the files.

    Raises:
        ModelError: a size makes no sense, or a tensor is missing or of another shape.
    """
    try:
        sizes = read_config(config)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} is no Llama's: {error}") from error
    tensors = dict(_mapped(files))
    tied = bool(config.get("tie_word_embeddings", False))
    names = {"model.embed_tokens": "embedding", "model.norm": "norm"} | {
        f"model.layers.{i}.{theirs}": f"blocks.{i}.{ours}"
        for i in range(sizes.num_hidden_layers)
        for theirs, ours in _PARTS.items()
    }
    state = {f"{ours}.weight": _take(tensors, f"{t}.weight", folder) for t, ours in names.items()}
    weight = None if tied else _take(tensors, "lm_head.weight", folder)
    with torch.device("meta"):
        # (Made of its own weight at once: to make one without memory, torch loads its compiler.)
        embedding: nn.Embedding = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            torch.empty(sizes.vocab_size, sizes.hidden_size)
        )
        body = LlamaBody(sizes, embedding=embedding)
    for name, parameter in body.state_dict().items():
        _check_shape(name, state[name], parameter.shape, folder)
    body.load_state_dict(state, assign=True)
    body.requires_grad_(False).eval()
    if weight is None:
        return body, LMHead.tied(body.embedding)
    _check_shape("lm_head.weight", weight, body.embedding.weight.shape, folder)
    head = LMHead(sizes.hidden_size, sizes.vocab_size, device="meta")
    head.load_state_dict({"weight": weight}, assign=True)
    return body, head.requires_grad_(False)


def _mapped(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dictionary
                yield name, file.get_tensor(name)


def _take(tensors: dict[str, Tensor], name: str, folder: Path) -> Tensor:
    if name not in tensors:
        raise ModelError(
            f"the weights in {folder} are not complete: {name} is missing. Fetch the safetensors "
            "files again"
        )
    return tensors[name]


def _check_shape(name: str, tensor: Tensor, shape: torch.Size, folder: Path) -> None:
    if tensor.shape != shape:
        raise ModelError(
            f"the weights in {folder} have other shapes than its config.json says: {name} is "
            f"{tuple(tensor.shape)}, and must be {tuple(shape)}. Fetch both from one place again"
        )
