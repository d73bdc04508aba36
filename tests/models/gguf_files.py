"""Tiny GGUF files, written with the package of llama.cpp from models of transformers."""

from pathlib import Path
from typing import Any

import gguf_metadata
import numpy as np
import pytest

from models import hf_folders

gguf = pytest.importorskip("gguf")

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def words() -> list[str]:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *letters, "Ġa", "Ġt", "Ġth"]
    return tokens + [f"[{n}]" for n in range(hf_folders.VOCAB - len(tokens))]


def write(
    path: Path,
    *,
    arch: str = "llama",
    quantization: str = "F32",
    entries: dict[str, Any] | None = None,
    divisors: Any = None,
    context: int = 64,
    **changes: Any,
) -> Any:
    """Write a Llama (or Qwen 2) as llama.cpp's converter would; return the model.

    `divisors` are those of the angles, as the converter writes them for Llama 3.1.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, **changes}
    model = hf_folders.make(arch, **sizes)
    config, writer = model.config, gguf.GGUFWriter(path, arch)
    gguf_metadata.add_sizes(writer, config, context=context)
    if arch == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    tokens = words()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ a", "Ġ t", "Ġt h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    for name, value in (entries or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(name, value)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(divisors, np.float32))
    kind = gguf.GGMLQuantizationType[quantization]
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            count = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows = array.reshape(count, 2, -1, array.shape[-1])
            array = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))
        if array.ndim == 2 and quantization != "F32":
            packed = gguf.quants.quantize(array, kind)
            writer.add_tensor(_name(name), packed, raw_dtype=kind)
        else:
            writer.add_tensor(_name(name), array)
    gguf_metadata.finish(writer)
    return model


def _name(theirs: str) -> str:
    around = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if theirs in around:
        return around[theirs]
    _, _, layer, part = theirs.split(".", 3)
    stem, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[stem]}.{kind}"
