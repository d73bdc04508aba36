"""The options of a sampler on the command line, for every command that has one.

Names, defaults and explanations stand in `lmhead/sampling/options.py`, once. They are read from its
source here, since importing it would load torch, and `--help` must not wait for that.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lmhead.cli._frame import SectionedOption, options_checked

if TYPE_CHECKING:
    from lmhead.models import LanguageModel
    from lmhead.sampling import Sampler

_F = TypeVar("_F", bound=Callable[..., Any])
_SOURCE = Path(__file__).parents[1] / "sampling" / "options.py"
SECTION = "Sampler options"

# What the command line does not offer: sequences of ids, or what a single text has no use for.
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
_HOLD_IDS = ("logit_bias", "allowed_token_ids", "suppress_tokens", "begin_suppress_tokens")
ORDERS = ("hf", "vllm", "llama.cpp")


@dataclass(frozen=True)
class Option:
    """An option of a sampler: its name, its type as written, its default and its explanation."""

    name: str
    kind: str
    default: Any
    help: str


@lru_cache(maxsize=1)
def sampler_fields() -> tuple[Option, ...]:
    """Every field of `lmhead.sampling.Options`, read from its source."""
    tree = ast.parse(_SOURCE.read_text(encoding="utf-8"))
    owner = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Options")
    explained = _explanations(ast.get_docstring(owner) or "")
    whole = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "_WHOLE"
    )
    whole_numbers = set(ast.literal_eval(ast.unparse(whole))) if whole is not None else set()
    found = []
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            name = ast.unparse(node.target)
            kind = "int" if name in whole_numbers else ast.unparse(node.annotation)
            default = ast.literal_eval(node.value)
            found.append(Option(name, kind, default, explained[name]))
    return tuple(found)


def _explanations(docstring: str) -> dict[str, str]:
    """{name: explanation} from the Attributes of a docstring; several names may share one."""
    listed = docstring.split("Attributes:\n")[1]
    listed = re.sub(r"\n {8,}", " ", listed)  # a line that goes on
    explained: dict[str, str] = {}
    for line in listed.splitlines():
        if match := re.fullmatch(r"\s+([a-z_0-9, ]+?):\s+(.+)", line):
            first, *others = match[1].split(", ")
            explained[first] = match[2][0].upper() + match[2][1:]
            explained.update({name: f"See --{_spelled(first)}." for name in others})
    return explained


def sampler_options(function: _F) -> _F:
    """Add every option of a sampler to a command, which gets them as `sampler`'s keywords."""
    made = [_option(o) for o in sampler_fields() if o.name not in LEFT_OUT]
    made += [
        click.option(
            "--order",
            cls=SectionedOption,
            section=SECTION,
            type=click.Choice(ORDERS),
            help="Whose sequence of stages.  [default: hf]",
        ),
        click.option(
            "--seed",
            cls=SectionedOption,
            section=SECTION,
            type=int,
            help="The same seed gives the same words.",
        ),
    ]
    for option in reversed(made):
        function = option(function)
    return function


def _spelled(name: str) -> str:
    return name.replace("_", "-")


def _option(o: Option) -> Callable[[_F], _F]:
    more: dict[str, Any] = {"default": None, "help": o.help, "cls": SectionedOption}
    declared = f"--{_spelled(o.name)}"
    if o.kind == "bool":
        return click.option(f"{declared}/--no-{_spelled(o.name)}", section=SECTION, **more)
    if o.default not in (None, 0):
        more["help"] += f"  [default: {o.default:g}]"
    if o.kind.startswith("Mapping"):
        more |= {"type": _Bias(), "multiple": True, "help": "Add BIAS to a logit; may repeat."}
    elif o.kind.startswith("Sequence"):
        more["type"] = _Ids()
    else:
        more["type"] = int if o.kind.startswith("int") else float
    return click.option(declared, o.name, section=SECTION, **more)


class _Bias(click.ParamType[tuple[int, float]]):
    name = "id=bias"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        id, _, bias = str(value).partition("=")
        try:
            return int(id), float(bias)
        except ValueError:
            self.fail(f"must be an id and a number, such as 42=-5; got {value!r}", param, ctx)


class _Ids(click.ParamType[list[int]]):
    name = "id,id,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        try:
            return [int(id) for id in str(value).split(",")]
        except ValueError:
            self.fail(f"must be ids with commas between them; got {value!r}", param, ctx)


def given_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sampler options that the user gave, out of all that a command was called with."""
    names = {o.name for o in sampler_fields()} | {"order", "seed"}
    given = {k: v for k, v in options.items() if k in names and v is not None and v != ()}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return given


def parse_options(text: str) -> dict[str, Any]:
    """Sampler options written as NAME=VALUE, with spaces or commas between them.

    >>> parse_options("temperature=0.7 top_p=0.9, order=llama.cpp")
    {'temperature': 0.7, 'top_p': 0.9, 'order': 'llama.cpp'}
    """
    kinds = {o.name: o.kind for o in sampler_fields() if o.name not in LEFT_OUT}
    kinds |= {"order": "str", "seed": "int"}
    found: dict[str, Any] = {}
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        name = name.strip("-").replace("-", "_")
        if not equals or name not in kinds:
            raise click.UsageError(
                f"a sampler is written as NAME=VALUE, such as 'temperature=0.7 top_p=0.9'; "
                f"got {part!r}"
            )
        kind = kinds[name]
        try:
            if kind == "bool":
                found[name] = {"true": True, "false": False}[value.lower()]
            elif kind == "str":
                found[name] = value
            else:
                found[name] = (int if kind.startswith("int") else float)(value)
        except (ValueError, KeyError):
            raise click.UsageError(f"{name} must be a number; got {value!r}") from None
    return found


def make_sampler(given: Mapping[str, Any]) -> Sampler:
    """A sampler of the options that were given; a mistake in them is one in the command.

    Ids that end a text are filled in by `with_ends`, once there is a model.
    """
    from lmhead.sampling import Sampler

    ends = [0] if {"min_length", "min_new_tokens"} & set(given) else None
    with options_checked():
        return Sampler(eos_token_id=ends, **given)


def with_ends(given: Mapping[str, Any], model: LanguageModel) -> Sampler:
    """The sampler for a model: the ids that end a text are the model's."""
    from lmhead.sampling import Sampler

    words = model.head.vocab_size
    for name in _HOLD_IDS:
        wrong = [id for id in given.get(name) or () if not 0 <= id < words]
        if wrong:
            raise click.UsageError(
                f"--{_spelled(name)} must hold ids in [0, {words}), the words of {model.name}; "
                f"got {wrong[0]}."
            )
    with options_checked():
        return Sampler(eos_token_id=list(model.eos_token_ids) or None, **given)
