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

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from lmhead.errors import ModelError
from lmhead.models.gguf_file import GgufFile
from lmhead.models.gguf_llama import is_plain_llama, read_llama
from lmhead.models.gguf_tokenizer import make_tokenizer
from lmhead.models.huggingface import in_short, load_huggingface, offline_and_quiet, transformers
from lmhead.models.model import LanguageModel

_RECEIPT = "cached.json"
_SAMPLES, _SAMPLE = 64, 2**16
_VERSION = 2  # of what is in the folder; another number makes all folders anew


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
    config, tensors = read_llama(file) if is_plain_llama(file) else _through_transformers(file)
    config |= _marks(file.entries)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as made:
            new = Path(made) / "folder"
            new.mkdir()
            save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
            (new / "config.json").write_text(json.dumps(config, indent=2))
            tokenizer.save(str(new / "tokenizer.json"))
            (new / "tokenizer_config.json").write_text(
                json.dumps(_tokenizer_config(file), indent=2)
            )
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


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """What stands beside a `tokenizer.json`: the names of marks, and the chat template."""
    tokens = file.entries["tokenizer.ggml.tokens"]
    found = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, id in _marks(file.entries).items():
        if 0 <= id < len(tokens):
            found[name.removesuffix("_id")] = tokens[id]
    template = file.entries.get("tokenizer.chat_template")
    return found if template is None else found | {"chat_template": template}


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
