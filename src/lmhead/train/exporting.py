"""A model to give away: the best checkpoint of a run, without what it takes to go on.

In:  a run or a checkpoint.
Out: a folder with `config.json`, `model.safetensors`, `tokenizer.json`, which `open_model` opens.
"""

from __future__ import annotations

import shutil
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lmhead.models.checkpoint import (
    CONFIG,
    MODEL,
    TOKENIZER,
    find_checkpoint,
    load_checkpoint,
    read_about,
)
from lmhead.train.files import TrainError, explained, new_folder, put_json, put_tensors

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def export(where: str | PathLike[str], out: str | PathLike[str], *, dtype: str = "float32") -> Path:
    """Write the model of a run to a new folder.

    Args:
        where: a run, whose best checkpoint is taken, or a checkpoint.
        out: the folder, which must not be there yet.
        dtype: "float32", "float16" or "bfloat16", of the file; an opened model computes in
            float32. Of the settings, the corpus keeps only the names of its files.

    Raises:
        ModelError: it is no language model of this package, or damaged.
        TrainError: the folder is there already, or cannot be written.

    Example::

        export("run", "model", dtype="float16")
        open_model("model")
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}")
    target = Path(out)
    if target.exists():
        raise TrainError(f"there is a {target} already: choose another name")
    folder = find_checkpoint(Path(where))
    load_checkpoint(folder)  # what cannot be opened is not given away
    about = read_about(folder)
    training: dict[str, Any] = about.get("training", {})
    training["corpus"] = [Path(path).name for path in training.get("corpus", [])]
    tensors = {
        name: tensor.to(_DTYPES[dtype]) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(folder / MODEL).items()
    }
    with explained(f"write the model to {target}"), new_folder(target) as part:
        put_json(part / CONFIG, about)
        put_tensors(part / MODEL, tensors)
        shutil.copyfile(folder / TOKENIZER, part / TOKENIZER)
    return target
