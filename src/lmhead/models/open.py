"""`open_model`: from what a user types to a model, by looking at the files.

In:  a folder, a file, the name of a bundled model, or one of the Hugging Face hub.
Out: a `LanguageModel`, or a `ModelError` that says which file is wrong and what to do.

What a file is, its first bytes say, not its name.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any

from lmhead.errors import ModelError
from lmhead.models import bundled
from lmhead.models.checkpoint import is_checkpoint, load_checkpoint
from lmhead.models.gguf import load_gguf
from lmhead.models.gguf_file import MAGIC
from lmhead.models.huggingface import in_short, load_huggingface
from lmhead.models.llama2c import load_llama2c
from lmhead.models.model import LanguageModel

# First bytes of what torch.save writes: a zip archive, or a bare pickle.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def open_model(
    where: str | PathLike[str] | None = None, *, download: bool = False
) -> LanguageModel:
    """Open a model by its folder, file or name; the body gives hidden states, the head is ours.

    Args:
        where: a folder in the format of Hugging Face, a checkpoint of `lmhead train`, a .gguf
            file, a checkpoint of llama2.c, or a name of `lmhead models list` (a folder of that
            name is `./name`); None for `smollm2` if it is installed, else `tiny`.
        download: whether `where` may be a name of the Hugging Face hub, such as
            "HuggingFaceTB/SmolLM2-135M"; without this nothing is ever fetched.

    Raises:
        ModelError: there is no such model, or its files are not what they should be.

    Example::

        model = open_model("smollm2")
        ids = torch.tensor([model.tokenizer.encode("The capital of France is")])
        hidden, cache = model.hidden(ids)
        model.head(hidden[:, -1]).topk(5)
    """
    if where is None:
        where = bundled.default_model()
    if isinstance(where, str) and where in bundled.BUNDLED:
        found = bundled.find(where)
        if found is None:
            raise bundled.not_installed(where)
        return _open(found, name=where)
    path = Path(where).expanduser()
    if path.exists():
        return _open(path)
    if download and _HUB_ID.fullmatch(str(where)):
        return _open(_fetch(str(where)), name=str(where))
    raise ModelError(_not_found(str(where), download))


def _open(path: Path, name: str | None = None) -> LanguageModel:
    if path.is_dir():
        return _open_folder(path, name)
    try:
        with path.open("rb") as file:
            begin = file.read(8)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if begin.startswith(MAGIC):
        return load_gguf(path, name=name)
    if path.suffix in (".safetensors", ".json"):
        raise ModelError(f"{path} is only a part of a model: name its folder, {path.parent}")
    if begin.startswith(_PICKLES):
        raise ModelError(
            f"{path} holds pickled Python objects, which may run any code when they are opened: "
            "lmhead never reads them. Save the model as safetensors (in transformers: "
            "model.save_pretrained(folder)) and open that folder"
        )
    return load_llama2c(path)


def _open_folder(folder: Path, name: str | None) -> LanguageModel:
    if is_checkpoint(folder):
        return load_checkpoint(folder, name=name)
    if not (folder / "config.json").is_file():
        files = sorted(folder.glob("*.gguf"))
        if len(files) == 1:
            return load_gguf(files[0], name=name)
        if files:
            raise ModelError(f"{folder} holds {len(files)} GGUF files: name one, e.g. {files[0]}")
    return load_huggingface(folder, name=name)


def _fetch(name: str) -> Path:
    """A model of the hub, in transformers' own cache: configuration, safetensors, tokenizer."""
    if find_spec("huggingface_hub") is None:
        raise ModelError("to download a model, pip install 'lmhead[hf]'")
    hub: Any = import_module("huggingface_hub")
    try:
        kinds = ["*.json", "*.safetensors", "chat_template.jinja"]
        return Path(hub.snapshot_download(name, allow_patterns=kinds))
    except Exception as error:  # no network, no such model, no permission
        raise ModelError(f"{name} cannot be downloaded: {in_short(error)}") from error


def _not_found(where: str, download: bool) -> str:
    names = ", ".join(bundled.BUNDLED)
    hint = ""
    if _HUB_ID.fullmatch(where) and not download:
        hint = " To fetch it from the Hugging Face hub, say so: --download, or download=True."
    return (
        f"there is no model {where!r}: no such file or folder, and no name of `lmhead models list` "
        f"({names}).{hint}"
    )
