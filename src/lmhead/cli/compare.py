"""`lmhead compare`: how far apart two models, or two samplers, are on a text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli._frame import below_threshold, options_checked
from lmhead.cli._model import (
    check_file,
    check_window,
    checked_text,
    model_json,
    model_options,
    open_model,
    read_text,
)
from lmhead.cli._sampler import make_sampler, parse_options, with_ends
from lmhead.cli._terminal import Progress, clip, cyan, dim, echo, left, right, tail, width
from lmhead.cli._tokens import readable, shown

if TYPE_CHECKING:
    from lmhead.analysis import Comparison, Piece

_MARGIN = "  "
_SEEN = 5e-5  # what four digits show
METRICS = ("kl", "max-kl", "tv", "disagreement")


@click.command("compare")
@click.argument("arguments", nargs=-1, metavar="A [B] FILE")
@click.option("--text", help="Compare on this text, in place of a file.")
@click.option("--sampler-a", metavar="OPTIONS", help="Of a sampler, as 'NAME=VALUE NAME=VALUE'.")
@click.option("--sampler-b", metavar="OPTIONS", help="Of the other one; '' for none.")
@click.option("--fail-above", type=float, help="End with code 4 if the metric is above this.")
@click.option(
    "--metric",
    type=click.Choice(METRICS),
    default="kl",
    show_default=True,
    help="What --fail-above looks at. kl and max-kl are in nats, tv is for samplers.",
)
@click.option("--window", type=click.IntRange(1), help="Tokens seen at once.  [default: 1024]")
@click.option(
    "--worst", type=click.IntRange(0), default=5, show_default=True, help="Differences to show."
)
@model_options
@_json.json_option
def command(
    arguments: tuple[str, ...],
    text: str | None,
    sampler_a: str | None,
    sampler_b: str | None,
    fail_above: float | None,
    metric: str,
    window: int | None,
    worst: int,
    as_json: bool,
    **options: Any,
) -> None:
    """How far apart two models are on a text, or two samplers of one model.

    At every position of the text: KL(A ‖ B) of the next-word distributions, and whether both hold
    the same word most probable. The models must have the same tokens. With --sampler-a and
    --sampler-b one model is read, and what is compared is what the samplers leave.

    FILE is a text in UTF-8, or - for standard input.

    \b
    Examples:
      lmhead compare ./model ./model-quantized.gguf book.txt
      lmhead compare ./model ./model-quantized.gguf book.txt --fail-above 0.01
      lmhead compare smollm2 ./fine-tuned --text "The capital of France is Paris."
      lmhead compare smollm2 book.txt --sampler-a top_p=0.9 --sampler-b min_p=0.1
    """
    samplers = (sampler_a is not None) or (sampler_b is not None)
    names, file = _names(arguments, text, samplers)
    if fail_above is not None and math.isnan(fail_above):
        raise click.UsageError("--fail-above must be a number; got nan.")
    if metric == "tv" and not samplers:
        raise click.UsageError("--metric tv needs --sampler-a and --sampler-b.")
    chains = [parse_options(given or "") for given in (sampler_a, sampler_b)] if samplers else []
    for chain in chains:
        chain.setdefault("seed", 0)
        make_sampler(chain)
    if file is not None:
        check_file(file)
    opened = [
        open_model(name, download=options["download"], threads=options["threads"]) for name in names
    ]
    for one in opened:
        check_window(one, window)
    from lmhead.analysis import compare_models, compare_samplers
    from lmhead.analysis.compare import check_same_words

    pieces: Iterable[str] = read_text(file) if file else [checked_text(text or "", "--text")]
    with Progress() as progress:
        progress("Comparing ...")
        if samplers:
            a, b = (with_ends(chain, opened[0]) for chain in chains)
            found = compare_samplers(opened[0], a, b, pieces, window=window, worst=worst)
        else:
            with options_checked():
                check_same_words(opened[0], opened[1])
            found = compare_models(opened[0], opened[1], pieces, window=window, worst=worst)
    sides = [repr(s) for s in (a, b)] if samplers else [model.name for model in opened]
    if as_json:
        document: dict[str, Any] = {"a": model_json(opened[0]), "b": model_json(opened[-1])}
        document |= {"sampler_a": None, "sampler_b": None}
        if samplers:
            document |= {"sampler_a": sides[0], "sampler_b": sides[1]}
        _json.write("compare", **(document | found.to_json()))
    else:
        echo(_lines(found, sides))
    value = {
        "kl": found.kl,
        "max-kl": found.max_kl,
        "tv": found.total_variation or 0.0,
        "disagreement": 1 - found.agreement,
    }[metric]
    below_threshold(metric, value, fail_above)


def _names(
    arguments: tuple[str, ...], text: str | None, samplers: bool
) -> tuple[list[str | None], str | None]:
    """The models, one for samplers and else two, and the file."""
    given = list(arguments)
    file = None
    if text is None:
        if not given:
            raise click.UsageError("Missing argument 'FILE'.")
        file = given.pop()
    if samplers:
        if len(given) > 1:
            raise click.UsageError("With samplers, give one model, not two.")
        return [given[0] if given else None], file
    if len(given) != 2:
        raise click.UsageError(
            f"Give two models{' and a FILE' if text is None else ''}; got {len(arguments)} "
            "arguments. For two samplers of one model: --sampler-a and --sampler-b."
        )
    return [*given], file


def _lines(found: Comparison, sides: list[str]) -> Iterator[str]:
    yield ""
    for letter, name in zip("AB", sides, strict=True):
        yield f"{_MARGIN}{cyan(letter)}  {name}"
    yield ""
    rows = [
        ("KL(A ‖ B)", f"{found.kl:.6f}", "nats, mean"),
        ("largest", f"{found.max_kl:.6f}", "nats"),
        ("same best word", f"{found.agreement:.2%}", f"of {found.positions:,} positions"),
    ]
    if found.total_variation is not None:
        rows.append(("total variation", f"{found.total_variation:.6f}", "mean, from 0 to 1"))
    if found.perplexity is not None:
        a, b = found.perplexity
        rows.append(("perplexity", f"{a:,.4f}", f"A; {b:,.4f} B"))
    for name, value, note in rows:
        yield f"{_MARGIN}{left(name, 17)}{right(value, 14)}   {dim(note)}"
    if found.max_kl >= _SEEN:
        yield ""
        yield from _differences(found)
    yield ""


def _differences(found: Comparison) -> Iterator[str]:
    yield dim(f"{_MARGIN}furthest apart  {left('A', 16)}{left('B', 16)}behind")
    for difference in found.differences:
        if difference.kl < _SEEN:
            break
        words = "".join(left(_word(*best), 16) for best in difference.best)
        room = width() - len(_MARGIN) - 16 - 32
        context = tail(readable(difference.before), room)
        yield f"{_MARGIN}{difference.kl:14.4f}  {words}{dim(context)}"


def _word(piece: Piece, p: float) -> str:
    return f"{clip(shown(piece), 9)} {p:.2f}"
