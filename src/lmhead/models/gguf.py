"""Models in GGUF files: converted once to a float32 Hugging Face folder, and opened from there.

The folder is in the user's cache: `$LMHEAD_CACHE`, or `lmhead` in `$XDG_CACHE_HOME` or `~/.cache`.
Its name depends on the file's size and samples of its content. It is renamed into place when it is
complete; a damaged one is replaced.

Llama models are read directly; transformers reads the other architectures.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lmhead.errors import ModelError
from lmhead.models.gguf_file import GgufFile
from lmhead.models.gguf_llama import is_plain_llama, read_blocks, read_llama
from lmhead.models.gguf_tokenizer import make_tokenizer, special_ids
from lmhead.models.huggingface import check_size, load_huggingface, quiet_transformers, transformers
from lmhead.models.language_model import LanguageModel
from lmhead.models.model_files import Fields, check_numbers, file_size, one_line, read_tensors
from lmhead.nn import LlamaBody
from lmhead.nn.decode_step import DecodeStep, StoredBlocks
from lmhead.screen.copy_cache import content_hash
from lmhead.user_cache import cache_folder

_RECEIPT = "cached.json"
_BLOCKS = "blocks.safetensors"
_SAMPLES, _SAMPLE = 64, 2**16
_VERSION = 2  # of the folder's content; another number replaces all folders


def load_gguf(path: str | PathLike[str], *, name: str | None = None) -> LanguageModel:
    """Open a GGUF file; the first time its weights are converted to float32 in the user's cache.

    Example::

        model = load_gguf("SmolLM2-135M-Instruct.Q4_1.gguf")
        generate(model, "The capital of France is", max_new_tokens=5).text
    """
    path = Path(path)
    name = name or path.stem
    folder = unpack(path)
    try:
        model = load_huggingface(folder, name=name)
    except ModelError:  # the cached folder has its size, but is damaged
        folder = unpack(path, again=True)
        try:
            model = load_huggingface(folder, name=name)
        except ModelError as error:
            raise ModelError(f"{path} cannot be opened: {error}") from error
    if isinstance(model.body, LlamaBody) and model.body.step is not None:
        model.body.step = DecodeStep(model.body, _blocks(path, folder))
    return model


def _blocks(path: Path, folder: Path) -> dict[str, StoredBlocks]:
    """Return the matrices that the file stores in blocks, from the cached folder."""
    cached = folder / _BLOCKS
    with suppress(OSError, SafetensorError, KeyError), safe_open(cached, framework="pt") as file:
        types = file.metadata() or {}
        tensors = read_tensors(cached)
        if types.pop("content") == content_hash(tensors):
            return {name: StoredBlocks(types[name], t) for name, t in tensors.items()}
    blocks_by_name = read_blocks(GgufFile(path))
    tensors = {name: blocks.data for name, blocks in blocks_by_name.items()}
    types = {name: blocks.type for name, blocks in blocks_by_name.items()}
    part = folder / f"{_BLOCKS}.{os.getpid()}.part"
    with suppress(OSError, SafetensorError):  # else they are read from the file each time
        save_file(tensors, part, metadata={**types, "content": content_hash(tensors)})
        part.replace(cached)
    return blocks_by_name


def unpack(path: str | PathLike[str], *, again: bool = False) -> Path:
    """Convert a GGUF file to a folder in the user's cache and return it, for other programs too.

    Example::

        folder = unpack("SmolLM2-135M-Instruct.Q4_1.gguf")
        AutoModelForCausalLM.from_pretrained(folder)  # of transformers
    """
    path = Path(path)
    folder = cache_folder() / "gguf" / f"{path.stem}-{_key(path)}"
    if again or not _complete(folder):
        shutil.rmtree(folder, ignore_errors=True)
        _convert(GgufFile(path), folder)
    return folder


def _key(path: Path) -> str:
    """Return a hash of the size and samples of a file: the same file elsewhere has the same key."""
    size = file_size(path)
    try:
        digest = hashlib.sha256(f"{_VERSION} {size}".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES + 1):
                file.seek(max(0, size - _SAMPLE) * i // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    return digest.hexdigest()[:16]


def _complete(folder: Path) -> bool:
    """Return whether every file of a folder exists, with its size."""
    try:
        sizes = json.loads((folder / _RECEIPT).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _convert(file: GgufFile, folder: Path) -> None:
    """Write a temporary folder, and rename it when it is complete."""
    tokenizer: Any = make_tokenizer(file.metadata)
    tokenizer_config = _tokenizer_config(file.metadata)
    config, tensors = read_llama(file) if is_plain_llama(file) else _through_transformers(file)
    config |= special_ids(file.metadata)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
            new = Path(temporary) / "folder"
            new.mkdir()
            save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
            (new / "config.json").write_text(json.dumps(config, indent=2))
            tokenizer.save(str(new / "tokenizer.json"))
            (new / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
            sizes = {entry.name: entry.stat().st_size for entry in new.iterdir()}
            (new / _RECEIPT).write_text(json.dumps(sizes))
            try:
                new.rename(folder)
            except OSError:
                if not _complete(folder):  # else another process was faster
                    raise
    except (OSError, SafetensorError) as error:
        size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        raise ModelError(
            f"{file.path} cannot be converted into {folder.parent}: {one_line(error)}. It takes "
            f"{size:,.0f} MiB; set LMHEAD_CACHE to a folder with enough space"
        ) from error


def _tokenizer_config(metadata: Fields) -> dict[str, Any]:
    """Return tokenizer_config.json: the names of special tokens, and the chat template."""
    tokens = metadata.list_of(str, "tokenizer.ggml.tokens")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, id in special_ids(metadata).items():
        config[name.removesuffix("_id")] = tokens[id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata.text("tokenizer.chat_template")
    return config


def readable_architectures() -> set[str]:
    """Return the architectures of decoders that the installed transformers reads from GGUF."""
    transformers()
    reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    others = {"general", "tokenizer", "t5", "umt5"}  # no architectures; encoders and decoders
    return {str(name) for name in reader.GGUF_SUPPORTED_ARCHITECTURES} - others


def _through_transformers(file: GgufFile) -> tuple[dict[str, Any], dict[str, Tensor]]:
    library = transformers()
    kind = file.metadata.text("general.architecture", "")
    readable = readable_architectures()
    separators = str.maketrans("", "", "-_")  # qwen2moe and qwen2_moe are the same
    if kind.translate(separators) not in {name.translate(separators) for name in readable}:
        raise ModelError(
            f"{file.path}: general.architecture must be one that transformers "
            f"{library.__version__} reads from GGUF ({', '.join(sorted(readable))}); got {kind!r}. "
            "Open the model's Hugging Face folder instead"
        )
    if find_spec("accelerate") is None:
        raise ModelError(
            f"{file.path}: transformers reads the architecture {kind!r} from GGUF with accelerate, "
            "which is not installed: pip install accelerate"
        )
    sizes = {k: v for k, v in file.metadata.values.items() if k.startswith(f"{kind}.")}
    location: dict[str, Any] = {
        "pretrained_model_name_or_path": file.path.resolve().parent,
        "gguf_file": file.path.name,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    with quiet_transformers(f"{file.path}, of the architecture {kind!r}"):
        check_numbers(Fields(file.path, sizes), len(file.tensors))
        stored = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
        check_size(file.path, library.AutoConfig.from_pretrained(**location), stored)
        model = library.AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # a tied head shares the embedding's memory
            tensors[name] = tensor.contiguous()
            seen.add(tensor.data_ptr())
    return config | {"dtype": "float32"}, tensors
