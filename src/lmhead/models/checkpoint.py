"""Checkpoints of `lmhead train`: `config.json`, `model.safetensors` and `tokenizer.json`.

    config.json         {"format": "lmhead", "version": 1, "kind": "decoder",
                         "model": {the fields of DecoderConfig}, "head": {"kind": "full"},
                         "eos_token_ids": [0], ...}
    model.safetensors   the tensors of a `DecoderLM` by name; a tied one once
    tokenizer.json      of the `tokenizers` library

The kind of head is "full", "sampled", "adaptive" or "hierarchical". A saved head has the order of
its tokens in its buffers: frequencies are needed only for a new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from lmhead.errors import ModelError
from lmhead.models.json_tokenizer import JsonTokenizer
from lmhead.models.language_model import LanguageModel
from lmhead.models.model_files import (
    Fields,
    StrPath,
    check_numbers,
    exists,
    one_line,
    read_json,
    read_tensor_headers,
    read_tensors,
)
from lmhead.nn import DecoderConfig, DecoderLM, TransformerConfig
from lmhead.vocab import AdaptiveHead, HierarchicalHead

KINDS = ("full", "sampled", "adaptive", "hierarchical")


def build_head(
    spec: Mapping[str, Any], sizes: DecoderConfig, frequencies: Any = None
) -> nn.Module | None:
    """Return the head of a specification; None for the full softmax that `DecoderLM` makes itself.

    "sampled" is a full head as well: only its training loss differs.

    >>> sizes = DecoderConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> build_head({"kind": "full"}, sizes) is None
    True
    """
    kind = spec.get("kind", "full")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"head must be one of {', '.join(KINDS)}; got {kind!r}")
    if kind in ("full", "sampled"):
        return None
    if kind == "adaptive":
        return AdaptiveHead(
            sizes.hidden_size,
            sizes.vocab_size,
            cutoffs=spec.get("cutoffs"),
            div_value=spec.get("div_value", 4.0),
            frequencies=frequencies,
        )
    # A saved head replaces this tree by that of its checkpoint.
    tree = "balanced" if frequencies is None else "huffman"
    return HierarchicalHead(sizes.hidden_size, sizes.vocab_size, tree=tree, frequencies=frequencies)


def specify_head(kind: str, head: nn.Module) -> dict[str, Any]:
    """Return the specification of a head for `config.json`; its tensors are saved apart."""
    spec: dict[str, Any] = {"kind": kind}
    if isinstance(head, AdaptiveHead):
        spec |= {"cutoffs": list(head.cutoffs), "div_value": head.div_value}
    return spec


CONFIG, MODEL, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
FORMAT, VERSION = "lmhead", 1
CHECKPOINTS, STATE = "checkpoints", "training.json"

_STEP = re.compile(r"step-(\d{8,})")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_Config = TypeVar("_Config", bound=TransformerConfig)


def load_checkpoint(where: StrPath, *, name: str | None = None) -> LanguageModel:
    """Open a checkpoint of `lmhead train`, in evaluation mode, without gradients.

    `where` is a checkpoint, or the folder of a run: its best checkpoint, or its last one if there
    was no validation. `name` is that of the folder if it is None.

    Example::

        model = load_checkpoint("run")
        lmhead.generate(model, "ROMEO:", max_new_tokens=50).text
    """
    folder = find_checkpoint(Path(where))
    about = read_about(folder)
    kind = about.text("kind", "")
    if kind != "decoder":
        raise ModelError(
            f"{about.path}: kind must be 'decoder', a language model; got {kind!r}"
            + (", which `lmhead translate` opens" if kind == "encoder-decoder" else "")
        )
    sizes = read_model_config(about, DecoderConfig)
    ends = read_eos_token_ids(about, sizes.vocab_size)
    with _described_by(about.path):
        head_spec = about.object("head").values
        model = DecoderLM(sizes, head=build_head(head_spec, sizes))
    load_weights(model, folder / MODEL)
    tokenizer = JsonTokenizer(folder / TOKENIZER, eos_token_id=ends[0] if ends else None)
    check_vocabulary(folder / TOKENIZER, len(tokenizer), tokenizer.max_id, sizes.vocab_size)
    model.requires_grad_(False).eval()
    head: Any = model.head  # an LMHead, or a head with the same methods
    return LanguageModel(
        model.body,
        head,
        eos_token_ids=ends,
        tokenizer=tokenizer,
        max_length=sizes.max_length,
        name=Path(where).resolve().name if name is None else name,
    )


def is_checkpoint(where: StrPath) -> bool:
    """Return whether `load_checkpoint` is the function to open a folder."""
    folder = Path(where)
    if not exists(folder / CONFIG):
        return bool(steps_of(folder))
    try:
        return read_json(folder / CONFIG).values.get("format") == FORMAT
    except ModelError:
        return False


def find_checkpoint(folder: Path) -> Path:
    """Return the folder itself if it is a checkpoint, else the best checkpoint of the run."""
    steps = steps_of(folder)
    if exists(folder / CONFIG) or not steps:
        return folder
    best = read_json(checkpoint_of(folder, steps[-1]) / STATE).values.get("best_step")
    return checkpoint_of(folder, best if type(best) is int and best in steps else steps[-1])


def read_about(folder: Path) -> Fields:
    """Return `config.json` of a checkpoint of a known version."""
    if not exists(folder / CONFIG):
        raise ModelError(f"no checkpoint in {folder}: there is no {CONFIG}")
    about = read_json(folder / CONFIG)
    if about.text("format", "") != FORMAT:
        raise about.error("format", f"'{FORMAT}'")
    if about.values.get("version") != VERSION:
        raise ModelError(f"{about.error('version', str(VERSION))}. Upgrade lmhead if it is newer")
    return about


def read_model_config(about: Fields, kind: type[_Config]) -> _Config:
    """Return the model's configuration, checked against the size of the weights beside it."""
    model_fields = about.object("model")
    tensors = read_tensor_headers(about.path.parent / MODEL)
    check_numbers(model_fields, len(tensors))
    with _described_by(about.path):
        config = kind(**model_fields.values)
    # Rough bound before anything is allocated; exact shapes are compared later.
    heads, inner = 2 * (config.num_attention_heads + config.key_heads), 2 * config.inner_size
    layers = sum(value for name, value in config.to_dict().items() if "layers" in name)
    rows = config.vocab_size + (config.max_length if config.position == "learned" else 0)
    described = (rows + layers * (heads * config.head_size + inner)) * config.hidden_size
    stored = sum(tensor.size for tensor in tensors.values())
    if described > 4 * stored + 2**20:
        raise ModelError(
            f"{about.path}: model must describe the weights in {MODEL}, {stored:,} numbers; got "
            f"sizes of {described:,} numbers"
        )
    return config


def read_eos_token_ids(about: Fields, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that end a text."""
    ids: list[int] = about.list_of(int, "eos_token_ids")
    if not all(0 <= id < vocab_size for id in ids):
        raise about.error("eos_token_ids", f"a list of token ids below {vocab_size}")
    return tuple(ids)


def check_vocabulary(path: Path, size: int, max_id: int, vocab_size: int) -> None:
    """Validate that a tokenizer has as many tokens as the model."""
    if size != vocab_size or max_id >= vocab_size:
        raise ModelError(
            f"{path} must have {vocab_size} tokens, as the model has; got {size} with ids up to "
            f"{max_id}: the two do not belong together"
        )


@contextmanager
def _described_by(path: Path) -> Iterator[None]:
    """Name the configuration in the errors of a model that is built from it."""
    try:
        yield
    except ModelError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{path} must describe a model of lmhead; {one_line(error)}") from error


def steps_of(run: Path) -> list[int]:
    """Return the steps of a run that have a checkpoint, in order."""
    folder = run / CHECKPOINTS
    matches = (_STEP.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in matches if match)


def checkpoint_of(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint.

    >>> checkpoint_of(Path("run"), 250).as_posix()
    'run/checkpoints/step-00000250'
    """
    return run / CHECKPOINTS / f"step-{step:08d}"


def load_weights(module: nn.Module, path: Path) -> None:
    """Copy the tensors of a safetensors file into a module."""
    read_tensor_headers(path)
    try:
        set_weights(module, read_tensors(path))
    except (SafetensorError, OSError, LookupError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path} does not hold this model: {one_line(error)}") from error


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module by name, a tied one once, under the name that comes first.

    >>> from lmhead import LMHead
    >>> model = nn.ModuleDict({"embedding": nn.Embedding(5, 2)})
    >>> model["head"] = LMHead.tied(model["embedding"])
    >>> list(weights_of(model))
    ['embedding.weight']
    """
    return {name: tensors[0] for name, tensors in _by_tensor(module).items()}


def set_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into a module: all that `weights_of` returns, and no others."""
    expected = weights_of(module)
    for name in sorted(expected.keys() ^ tensors.keys()):
        problem = "is missing" if name in expected else "is not part of the model"
        raise ValueError(f"the tensor {name} {problem}")
    for name, tensor in expected.items():
        given = tensors[name]
        if given.shape != tensor.shape:
            raise ValueError(
                f"{name} must have shape {tuple(tensor.shape)}; got {tuple(given.shape)}"
            )
        dtypes = _FLOATS if tensor.is_floating_point() else (tensor.dtype,)
        if given.dtype not in dtypes:
            wanted = " or ".join(map(str, dtypes))
            raise ValueError(f"{name} must be {wanted}; got {given.dtype}")
    module.load_state_dict(
        {name: tensors[first] for first, (_, names) in _by_tensor(module).items() for name in names}
    )


def _by_tensor(module: nn.Module) -> dict[str, tuple[Tensor, list[str]]]:
    """Return each tensor under its first name, with all its names."""
    first: dict[int, str] = {}
    names_by_tensor: dict[str, tuple[Tensor, list[str]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        key = first.setdefault(id(tensor), name)
        names_by_tensor.setdefault(key, (tensor.detach(), []))[1].append(name)
    return names_by_tensor
