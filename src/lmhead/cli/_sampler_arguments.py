"""Sampler options on the command line; the table is in `lmhead/sampler_options.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lmhead.cli._command_group import SectionedOption, as_usage_errors, combine_options
from lmhead.sampler_options import ORDERS, Options

if TYPE_CHECKING:
    from lmhead.models import LanguageModel
    from lmhead.sampling import Sampler

_F = TypeVar("_F", bound=Callable[..., Any])
SECTION = "Sampler options"

# Not offered on the command line: sequences of ids, and options that a single text does not need.
LEFT_OUT = {
    "bad_words_ids",
    "dry_sequence_breakers",
    "eos_token_id",  # the model's
    "forced_bos_token_id",
    "forced_eos_token_id",
    "forced_tokens",
    "guidance_scale",
    "max_length",
    "sequence_bias",
}
_ID_OPTIONS = ("logit_bias", "allowed_token_ids", "suppress_tokens", "begin_suppress_tokens")


def sampler_options(function: _F) -> _F:
    """Add every sampler option to a command."""
    decorators = [_option(f) for f in fields(Options) if f.name not in LEFT_OUT]
    decorators += [
        _in_section(
            "--order",
            type=click.Choice(ORDERS),
            help="Order of the stages: as in Hugging Face, vLLM or llama.cpp.  [default: hf]",
        ),
        _in_section("--seed", type=int, help="Random seed; the same seed gives the same tokens."),
    ]
    return combine_options(*decorators)(function)


_in_section = partial(click.option, cls=SectionedOption, section=SECTION)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _kind(f: Field[Any]) -> str:
    """Return the kind of an option: bool, int, float, bias, ids or text."""
    kind = str(f.type)
    if kind == "bool":
        return kind
    if kind.startswith("Mapping"):
        return "bias"
    if kind.startswith("Sequence"):
        return "ids"
    integer = f.metadata["limits"].get("integer") or kind.startswith("int")
    return "int" if integer else "float"


def _option(f: Field[Any]) -> Callable[[_F], _F]:
    help, kind, declared = f.metadata["help"], _kind(f), f"--{_dashed(f.name)}"
    if f.default not in (None, 0):
        shown = f"--{_dashed(f.name)}" if kind == "bool" else f"{f.default:g}"
        help += f"  [default: {shown}]"
    if kind == "bias":
        help = "Add BIAS to the logit of token ID; may be repeated."
    types: dict[str, Any] = {
        "bool": None, "int": int, "float": float, "ids": _ids, "bias": _bias,
    }  # fmt: skip
    if kind == "bool":
        declared += f"/--no-{_dashed(f.name)}"
    form: dict[str, Any] = {"multiple": kind == "bias"}
    if kind in ("ids", "bias"):
        form["metavar"] = "ID,ID,..." if kind == "ids" else "ID=BIAS"
    return _in_section(declared, f.name, type=types[kind], default=None, help=help, **form)


def _bias(given: str) -> tuple[int, float]:
    id, _, text = given.partition("=")
    try:
        pair = int(id), float(text)
    except ValueError:
        message = f"must be a token id and a number, such as 42=-5; got {given!r}"
        raise click.BadParameter(message) from None
    if math.isnan(pair[1]) or pair[1] == math.inf:
        raise click.BadParameter(f"the bias must be finite or -inf; got {given!r}")
    return pair


def _ids(given: str) -> list[int]:
    try:
        return [int(id) for id in given.split(",")]
    except ValueError:
        message = f"must be token ids separated by commas; got {given!r}"
        raise click.BadParameter(message) from None


def given_sampler_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampler options that were given, out of all options of a command."""
    names = {f.name for f in fields(Options)} | {"order", "seed"}
    given = {k: v for k, v in options.items() if k in names and v is not None and v != ()}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def parse_options(text: str) -> dict[str, Any]:
    """Parse sampler options written as NAME=VALUE, separated by spaces or commas.

    >>> parse_options("temperature=0.7 top_p=0.9, order=llama.cpp")
    {'temperature': 0.7, 'top_p': 0.9, 'order': 'llama.cpp'}
    """
    kinds = {f.name: _kind(f) for f in fields(Options) if f.name not in LEFT_OUT}
    kinds |= {"order": "text", "seed": "int"}
    options: dict[str, Any] = {}
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        name = name.strip("-").replace("-", "_")
        if not equals or name not in kinds:
            raise click.UsageError(
                f"sampler options must be NAME=VALUE, such as 'temperature=0.7 top_p=0.9'; "
                f"got {part!r}"
            )
        kind = kinds[name]
        try:
            if kind == "bool":
                options[name] = {"true": True, "false": False}[value.lower()]
            elif kind == "text":
                options[name] = value
            else:
                options[name] = (int if kind == "int" else float)(value)
        except (ValueError, KeyError):
            raise click.UsageError(f"{name} must be a number; got {value!r}") from None
    return options


def make_sampler(given: Mapping[str, Any]) -> Sampler:
    """Validate the options before a model is opened; errors are usage errors.

    `sampler_for_model` adds the end-of-text ids of the model.
    """
    from lmhead.sampling import Sampler

    ends = [0] if {"min_length", "min_new_tokens"} & set(given) else None
    with as_usage_errors():
        return Sampler(eos_token_id=ends, **given)


def sampler_for_model(given: Mapping[str, Any], model: LanguageModel) -> Sampler:
    """Return the sampler, with the model's end-of-text ids."""
    from lmhead.sampling import Sampler

    vocab = model.head.vocab_size
    for name in _ID_OPTIONS:
        wrong = [id for id in given.get(name) or () if not 0 <= id < vocab]
        if wrong:
            raise click.UsageError(
                f"--{_dashed(name)} must be token ids in [0, {vocab}); got {wrong[0]}."
            )
    with as_usage_errors():
        return Sampler(eos_token_id=list(model.eos_token_ids) or None, **given)
