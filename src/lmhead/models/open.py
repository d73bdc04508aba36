"""`open_model`: from what a user types to a model, by looking at the files.

In:  a folder, a file, or the name of a bundled model.
Out: a `LanguageModel`, or a `ModelError` that says which file is wrong and what to do.

What a file is, its first bytes say, not its name.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from lmhead.errors import ModelError
from lmhead.models.huggingface import load_huggingface
from lmhead.models.llama2c import load_llama2c
from lmhead.models.model import LanguageModel

# First bytes of what torch.save writes: a zip archive, or a bare pickle.
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def open_model(where: str | PathLike[str], *, download: bool = False) -> LanguageModel:
    """Open a model by its folder, file or name; the body gives hidden states, the head is ours.

    Args:
        where: a llama2.c checkpoint.
        download: whether a name of the Hugging Face hub may be fetched; nothing ever is without.

    Raises:
        ModelError: there is no such model, or its files are not what they should be.

    Example::

        model = open_model("stories15M.bin")
        hidden, cache = model.hidden(torch.tensor([model.tokenizer.encode("Once upon")]))
        model.head(hidden[:, -1]).argmax(-1)
    """
    path = Path(where)
    if path.is_file():
        return _open_file(path)
    if path.is_dir():
        return load_huggingface(path)
    raise ModelError(
        f"where must be a model: a file on this machine; got {str(where)!r}, which does not exist"
        + (", and cannot be downloaded" if download else "")
    )


def _open_file(path: Path) -> LanguageModel:
    try:
        with path.open("rb") as file:
            begin = file.read(8)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if begin.startswith(_PICKLES):
        raise ModelError(
            f"{path} holds pickled Python objects, which may run any code when they are opened: "
            "lmhead never reads them. Save the model as safetensors (in transformers: "
            "model.save_pretrained(folder)) and open that folder"
        )
    return load_llama2c(path)
