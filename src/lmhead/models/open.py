"""`open_model`: open a model of any supported format.

In:  a folder, a file, the name of a bundled model, or a name of the Hugging Face hub.
Out: a `LanguageModel`, or a `ModelError` that says which file is wrong and what to do.

The format of a file is detected from its first bytes, not from its name.
"""

from __future__ import annotations

import hashlib
import re
from codecs import getincrementaldecoder
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lmhead.errors import ModelError
from lmhead.models import bundled
from lmhead.models.checkpoint import is_checkpoint, load_checkpoint
from lmhead.models.gguf import load_gguf
from lmhead.models.gguf_file import MAGIC, GgufFile
from lmhead.models.gguf_llama import is_plain_llama
from lmhead.models.huggingface import load_huggingface
from lmhead.models.language_model import ENGINES, Engine, LanguageModel
from lmhead.models.llama2c import load_llama2c
from lmhead.models.llama_cpp import LlamaCppBody, has_own_head
from lmhead.models.model_files import StrPath, exists, file_size, one_line
from lmhead.user_cache import is_offline

# First bytes of files that torch.save writes: a zip archive, or a bare pickle.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def open_model(
    where: StrPath | None = None, *, download: bool = False, engine: Engine | None = None
) -> LanguageModel:
    """Open a model by its folder, file or name: a body that returns hidden states, and a head.

    Args:
        where: a Hugging Face folder, a checkpoint of `lmhead train`, a .gguf file, a llama2.c
            checkpoint, a name of `lmhead models list` (for a folder of that name, write `./name`),
            or a name of the Hugging Face hub, such as "HuggingFaceTB/SmolLM2-135M", that has been
            downloaded before; None for `smollm2` if it is installed, else `tiny`.
        download: whether to download a name of the hub; otherwise nothing is ever downloaded.
        engine: computes the body; `model.engine` is the one in use. "core": the compiled core,
            for single tokens of a Llama in float32. "torch". "llama.cpp", with the package
            xllamacpp: for GGUF files, in llama.cpp's own precision. None for "core" where it is
            supported, else "torch". The head is ours with all of them.

    Raises:
        ModelError: there is no such model, or its files are damaged or not supported; or not by
            this engine.

    Example::

        model = open_model("smollm2")
        ids = torch.tensor([model.tokenizer.encode("The capital of France is")])
        hidden, cache = model.hidden(ids)
        model.head(hidden[:, -1]).topk(5)
    """
    if engine not in (None, *ENGINES):
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, or None; got {engine!r}")
    path, name = _find(where, download)
    return _with_engine(_open(path, name=name), path, engine)


def _find(where: StrPath | None, download: bool) -> tuple[Path, str | None]:
    """Return the path of a model, and the name by which it was found."""
    if where is None:
        where = bundled.default_model()
    if isinstance(where, str) and where in bundled.BUNDLED:
        return bundled.require(where), where
    path = Path(where).expanduser()
    if exists(path):
        return path, None
    if _HUB_ID.fullmatch(str(where)):
        folder = _download(str(where)) if download else _find_downloaded(str(where))
        if folder is not None:
            return folder, str(where)
    hint = ""
    if _HUB_ID.fullmatch(str(where)) and not download:
        hint = " To download it from the Hugging Face hub: --download, or download=True."
    raise ModelError(
        f"there is no model {str(where)!r}: no such file or folder, and no name of `lmhead models "
        f"list` ({', '.join(bundled.BUNDLED)}).{hint}"
    )


def _with_engine(model: LanguageModel, path: Path, engine: Engine | None) -> LanguageModel:
    """Return a model whose body is computed by this engine."""
    if engine == "torch" and model.engine == "core":
        body: Any = model.body
        body.step = None
    elif engine == "llama.cpp":
        files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
        if len(files) != 1 or not _is_gguf(files[0]):
            raise ModelError(f"engine 'llama.cpp' opens GGUF files; {path} is of another format")
        file = GgufFile(files[0])
        body = LlamaCppBody(
            files[0],
            model.head.vocab_size,
            plain_llama=is_plain_llama(file),
            embedding=None if has_own_head(file) else model.head.weight,
        )
        return replace(model, body=body)
    elif engine is not None and model.engine != engine:
        raise ModelError(f"{path} cannot be computed by the engine {engine!r}, only by torch")
    return model


def _is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _open(path: Path, name: str | None = None) -> LanguageModel:
    if path.is_dir():
        return _open_folder(path, name)
    file_size(path)  # a pipe or a device would block
    try:
        with path.open("rb") as file:
            begin = file.read(8)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {one_line(error)}") from error
    if begin.startswith(MAGIC):
        return load_gguf(path, name=name)
    if path.suffix in (".safetensors", ".json"):
        raise ModelError(f"{path} is only a part of a model: give its folder, {path.parent}")
    if begin.startswith(_PICKLES):
        raise ModelError(
            f"{path} holds pickled Python objects, which may run any code when they are opened: "
            "lmhead never reads them. Save the model as safetensors (in transformers: "
            "model.save_pretrained(folder)) and open that folder"
        )
    if _is_text(begin):
        raise ModelError(
            f"{path} is {'a text file' if begin else 'empty'}, not a model: give a Hugging Face "
            "folder, a .gguf file, a llama2.c checkpoint, or a folder that `lmhead train` wrote"
        )
    return load_llama2c(path)


def _is_text(begin: bytes) -> bool:
    """Return whether a file begins as UTF-8 text does; no checkpoint of llama2.c does."""
    try:
        text = getincrementaldecoder("utf-8")().decode(begin)  # the last character may be cut
    except UnicodeDecodeError:
        return False
    return "".join(text.split()).isprintable()


def _open_folder(folder: Path, name: str | None) -> LanguageModel:
    if is_checkpoint(folder):
        return load_checkpoint(folder, name=name)
    if not exists(folder / "config.json"):
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return load_gguf(files[0], name=name)
        if files:
            raise ModelError(f"{folder} holds {len(files)} GGUF files: give one, e.g. {files[0]}")
    return load_huggingface(folder, name=name)


def _find_downloaded(name: str) -> Path | None:
    """Return the folder of a model in the hub's own cache, without a connection."""
    if find_spec("huggingface_hub") is None:
        return None
    hub: Any = import_module("huggingface_hub")
    try:
        config = hub.try_to_load_from_cache(name, "config.json")
    except ValueError:  # of the hub's validation: the name cannot be a model's
        return None
    return Path(config).parent if isinstance(config, str) else None


def _download(name: str) -> Path:
    """Download a model of the hub into the hub's own cache and return its folder."""
    if find_spec("huggingface_hub") is None:
        raise ModelError("to download a model, pip install 'lmhead[models]'")
    if is_offline("HF_HUB_OFFLINE"):
        raise ModelError(
            f"{name} cannot be downloaded: --offline, LMHEAD_OFFLINE or HF_HUB_OFFLINE forbids it"
        )
    hub: Any = import_module("huggingface_hub")
    try:
        kinds = ["*.json", "*.safetensors", "chat_template.jinja"]
        folder = Path(hub.snapshot_download(name, allow_patterns=kinds))
    except Exception as error:  # no network, no such model, no permission
        raise ModelError(f"{name} cannot be downloaded: {one_line(error)}") from error
    check_hashes(folder)
    return folder


def check_hashes(folder: Path) -> None:
    """Validate the files of a folder in the hub's cache: each links to a file named by its hash.

    SHA-256 for large files, else Git's SHA-1. Files that are not links are not checked.
    """
    for path in sorted(folder.rglob("*")):
        blob = path.resolve()
        if not path.is_symlink() or len(blob.name) not in (40, 64) or not blob.is_file():
            continue
        if len(blob.name) == 64:
            digest = hashlib.sha256()
        else:
            digest = hashlib.sha1(f"blob {blob.stat().st_size}\0".encode(), usedforsecurity=False)
        with blob.open("rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        if digest.hexdigest() != blob.name:
            raise ModelError(
                f"{path} does not have the hash {blob.name}: delete {blob} and try again"
            )
