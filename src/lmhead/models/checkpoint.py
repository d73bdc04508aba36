"""Checkpoints of `lmhead train`: `config.json`, `model.safetensors` and `tokenizer.json`.

In:  such a folder, or the folder of a run, whose best checkpoint is taken.
Out: a `LanguageModel`, or a `ModelError` that says which file is wrong and what to do.

    config.json         {"format": "lmhead", "version": 1, "kind": "decoder",
                         "model": {the fields of DecoderConfig}, "head": {"kind": "full"},
                         "eos_token_ids": [0], ...}
    model.safetensors   the tensors of a `DecoderLM` by name; a tied one once
    tokenizer.json      of the `tokenizers` library
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lmhead.errors import ModelError
from lmhead.models.folder import read_json
from lmhead.models.heads import build_head
from lmhead.models.json_tokenizer import JsonTokenizer
from lmhead.models.model import LanguageModel
from lmhead.nn import DecoderConfig, DecoderLM

CONFIG, MODEL, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
FORMAT, VERSION = "lmhead", 1
CHECKPOINTS, STATE = "checkpoints", "training.json"

_STEP = re.compile(r"step-(\d{8,})")


def load_checkpoint(where: str | PathLike[str], *, name: str | None = None) -> LanguageModel:
    """Open what `lmhead train` has made.

    Args:
        where: a checkpoint, or the folder of a run: its best checkpoint, or its last one where
            nothing was held out for validation.
        name: of the model; None for that of the folder.

    Returns:
        The model, in evaluation mode, without gradients.

    Raises:
        ModelError: a file is missing, damaged or of another format; the message names it.

    Example::

        model = load_checkpoint("run")
        lmhead.generate(model, "ROMEO:", max_new_tokens=50).text
    """
    folder = find_checkpoint(Path(where))
    path = folder / CONFIG
    about = read_about(folder)
    if about.get("kind") != "decoder":
        raise ModelError(
            f"{path}: kind must be 'decoder', a language model; got {about.get('kind')!r}"
            + (", which `lmhead translate` opens" if about.get("kind") == "encoder-decoder" else "")
        )
    try:
        sizes = DecoderConfig(**about["model"])
        model = DecoderLM(sizes, head=build_head(about.get("head", {}), sizes))
        ends = tuple(int(id) for id in about.get("eos_token_ids", []))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} must describe a model of lmhead; {_reason(error)}") from error
    load_weights(model, folder / MODEL)
    tokenizer = JsonTokenizer(folder / TOKENIZER, eos_token_id=ends[0] if ends else None)
    if len(tokenizer) != sizes.vocab_size:
        raise ModelError(
            f"{folder / TOKENIZER} must have {sizes.vocab_size} words, as the model has; "
            f"got {len(tokenizer)}: the two do not belong together"
        )
    model.requires_grad_(False).eval()
    head: Any = model.head  # an LMHead, or one that answers as it does
    return LanguageModel(
        model.body,
        head,
        eos_token_ids=ends,
        tokenizer=tokenizer,
        max_length=sizes.max_length,
        name=Path(where).resolve().name if name is None else name,
    )


def is_checkpoint(where: str | PathLike[str]) -> bool:
    """Whether `load_checkpoint` is the one to open a folder."""
    folder = Path(where)
    if not (folder / CONFIG).is_file():
        return bool(steps_of(folder))
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == FORMAT


def find_checkpoint(folder: Path) -> Path:
    """The checkpoint that a folder is, or the best one of a run."""
    steps = steps_of(folder)
    if (folder / CONFIG).is_file() or not steps:
        return folder
    state = read_json(checkpoint_of(folder, steps[-1]) / STATE)
    best = state.get("best_step")
    return checkpoint_of(folder, best if best in steps else steps[-1])


def read_about(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint, if it is one of ours and of a version that is known."""
    about = read_json(folder / CONFIG)
    if about.get("format") != FORMAT:
        raise ModelError(f"{folder / CONFIG}: format must be 'lmhead'; got {about.get('format')!r}")
    if about.get("version") != VERSION:
        raise ModelError(
            f"{folder / CONFIG}: version must be {VERSION}; got {about.get('version')!r}. A newer "
            "lmhead has written it: upgrade this one"
        )
    return about


def steps_of(run: Path) -> list[int]:
    """The steps of a run that have a checkpoint, in order."""
    folder = run / CHECKPOINTS
    found = (_STEP.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)


def checkpoint_of(run: Path, step: int) -> Path:
    """The folder of a step's checkpoint.

    >>> checkpoint_of(Path("run"), 250).as_posix()
    'run/checkpoints/step-00000250'
    """
    return run / CHECKPOINTS / f"step-{step:08d}"


def load_weights(module: nn.Module, path: Path) -> None:
    """Fill a module from a safetensors file, or say what is wrong with it."""
    try:
        set_weights(module, load_file(path))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: the folder holds no weights") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (SafetensorError, ValueError, RuntimeError) as error:  # the last one is torch's
        raise ModelError(f"{path} does not hold this model: {error}") from error


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """The tensors of a module by name, a tied one once, under the name that comes first.

    >>> from lmhead import LMHead
    >>> model = nn.ModuleDict({"embedding": nn.Embedding(5, 2)})
    >>> model["head"] = LMHead.tied(model["embedding"])
    >>> list(weights_of(model))
    ['embedding.weight']
    """
    return {name: tensors[0] for name, tensors in _by_tensor(module).items()}


def set_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a module: all that `weights_of` gives, and no others."""
    own = weights_of(module)
    for name in sorted(own.keys() ^ tensors.keys()):
        what = "is missing" if name in own else "has no place in the model"
        raise ValueError(f"the tensor {name} {what}")
    for name, tensor in own.items():
        if tensors[name].shape != tensor.shape:
            raise ValueError(
                f"{name} must have shape {tuple(tensor.shape)}; got {tuple(tensors[name].shape)}"
            )
    module.load_state_dict(
        {name: tensors[first] for first, (_, names) in _by_tensor(module).items() for name in names}
    )


def _by_tensor(module: nn.Module) -> dict[str, tuple[Tensor, list[str]]]:
    """Each tensor under its first name, with all its names."""
    first: dict[int, str] = {}
    found: dict[str, tuple[Tensor, list[str]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        key = first.setdefault(id(tensor), name)
        found.setdefault(key, (tensor.detach(), []))[1].append(name)
    return found


def _reason(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
