"""A model in a GGUF file: made a folder of float32 numbers once, and opened from there.

In:  a .gguf file, quantized or not.
Out: a `LanguageModel`.

The folder, in the format of Hugging Face, lies in the user's cache: `$LMHEAD_CACHE`, or `lmhead` in
`$XDG_CACHE_HOME` or `~/.cache`. Its name follows from the file's size and samples of it:
another file, another folder. It appears all at once, by a rename; a damaged one is made anew.

Llamas are read directly; transformers reads the other architectures.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lmhead.errors import ModelError
from lmhead.models.gguf_file import GgufFile
from lmhead.models.gguf_tokenizer import make_tokenizer
from lmhead.models.huggingface import in_short, load_huggingface, offline_and_quiet, transformers
from lmhead.models.model import LanguageModel

_RECEIPT = "cached.json"
_SAMPLES, _SAMPLE = 64, 2**16
_VERSION = 1  # of what is in the folder; another number makes all folders anew


def load_gguf(path: str | PathLike[str], *, name: str | None = None) -> LanguageModel:
    """Open a GGUF file; the first time its weights become float32 in the user's cache.

    Args:
        path: the file.
        name: what to call the model; None for the name of the file.

    Raises:
        ModelError: a file that is damaged, of an unknown kind, or a cache without room.

    Example::

        model = load_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")
        generate(model, "The capital of France is", max_new_tokens=5).text
    """
    path = Path(path)
    name = name or path.stem
    folder = unpack(path)
    try:
        return load_huggingface(folder, name=name)
    except ModelError:  # what is in the cache has its length, but is damaged
        return load_huggingface(unpack(path, again=True), name=name)


def unpack(path: str | PathLike[str], *, again: bool = False) -> Path:
    """The folder in the user's cache that holds what is in a GGUF file, for other programs too.

    Args:
        path: the file.
        again: make it anew, even if it is there.

    Raises:
        ModelError: as `load_gguf`.

    Example::

        folder = unpack("SmolLM2-135M-Instruct.Q4_1.gguf")
        AutoModelForCausalLM.from_pretrained(folder)  # of transformers
    """
    path = Path(path)
    folder = cache_folder() / "gguf" / f"{path.stem}-{_key(path)}"
    if again or not _whole(folder):
        shutil.rmtree(folder, ignore_errors=True)
        _make(GgufFile(path), folder)
    return folder


def cache_folder() -> Path:
    """Where unpacked models are kept: $LMHEAD_CACHE, or lmhead in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("LMHEAD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmhead"


def _key(path: Path) -> str:
    """A name for the contents, without reading them all: the size, and samples from all over.

    The same file in another place has the same name, and is unpacked once.
    """
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(f"{_VERSION} {size}".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES + 1):
                file.seek(max(0, size - _SAMPLE) * i // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:16]


def _whole(folder: Path) -> bool:
    """Whether every file of a folder is there, in its length."""
    try:
        sizes = json.loads((folder / _RECEIPT).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _make(file: GgufFile, folder: Path) -> None:
    """Write the folder beside its place, and put it there when it is whole."""
    file.check()
    tokenizer: Any = make_tokenizer(file.entries, file.path)
    config, tensors = _llama(file) if _is_plain_llama(file) else _through_transformers(file)
    config |= _marks(file.entries)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as made:
            new = Path(made) / "folder"
            new.mkdir()
            save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
            (new / "config.json").write_text(json.dumps(config, indent=2))
            tokenizer.save(str(new / "tokenizer.json"))
            sizes = {entry.name: entry.stat().st_size for entry in new.iterdir()}
            (new / _RECEIPT).write_text(json.dumps(sizes))
            try:
                new.rename(folder)
            except OSError:
                if not _whole(folder):  # another process was faster, or it is a real failure
                    raise
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        raise ModelError(
            f"{file.path} cannot be unpacked into {folder.parent}: {error}. It takes {size:,.0f} "
            "MiB; set LMHEAD_CACHE to a folder with that much room"
        ) from error


def _marks(entries: dict[str, Any]) -> dict[str, Any]:
    names = ("bos_token_id", "eos_token_id")
    found = {name: entries.get(f"tokenizer.ggml.{name}") for name in names}
    return {name: id for name, id in found.items() if id is not None}


# Llamas -------------------------------------------------------------------------------------------

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


def _is_plain_llama(file: GgufFile) -> bool:
    """A Llama with the tensors that every Llama has, and no others."""
    if file.entries.get("general.architecture") != "llama":
        return False
    if "rope_freqs.weight" in file.tensors or any("rope.scaling" in key for key in file.entries):
        raise ModelError(
            f"{file.path} is a Llama with scaled rotary positions, which lmhead does not read from "
            "GGUF. Open the model's folder in the format of Hugging Face instead"
        )
    layers = range(int(file.entries.get("llama.block_count", 0)))
    blocks = {f"blk.{i}.{part}.weight" for i in layers for part in _PARTS}
    around = {"token_embd.weight", "output_norm.weight"}
    return set(file.tensors) - {"output.weight"} == blocks | around


def _llama(file: GgufFile) -> tuple[dict[str, Any], dict[str, Tensor]]:
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
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": size,
        "intermediate_size": int(entry("feed_forward_length")),
        "num_hidden_layers": int(entry("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": int(entry("attention.key_length", size // heads)),
        "max_position_embeddings": int(entry("context_length")),
        "rms_norm_eps": float(entry("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(entry("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "dtype": "float32",
    }
    return config, tensors


def _half_by_half(weight: Tensor, heads: int) -> Tensor:
    """From llama.cpp's order, where rows 2i and 2i + 1 of a head are a pair, to i and i + d/2."""
    rows, size = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, size)
    return pairs.transpose(1, 2).reshape(rows, size).contiguous()


# Others -------------------------------------------------------------------------------------------


def _through_transformers(file: GgufFile) -> tuple[dict[str, Any], dict[str, Tensor]]:
    library = transformers()
    try:
        with offline_and_quiet():
            model = library.AutoModelForCausalLM.from_pretrained(
                file.path.resolve().parent,
                gguf_file=file.path.name,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
            )
    except Exception as error:  # whatever transformers makes of it
        kind = file.entries.get("general.architecture")
        raise ModelError(
            f"transformers cannot open {file.path}, of the architecture {kind!r}: {in_short(error)}"
        ) from error
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # a tied head is the embedding again
            tensors[name] = tensor.contiguous()
            seen.add(tensor.data_ptr())
    return config | {"dtype": "float32"}, tensors
