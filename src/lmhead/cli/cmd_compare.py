"""`lmhead compare`: divergence of two models, or two samplers, on a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli import _model_arguments as inputs
from lmhead.cli import _terminal as term
from lmhead.cli._command_group import (
    as_usage_errors,
    check_threshold,
    choice_option,
    integer_option,
)
from lmhead.cli._sampler_arguments import make_sampler, parse_options, sampler_for_model
from lmhead.progress import Progress

if TYPE_CHECKING:
    from lmhead.analysis import Comparison

_VISIBLE = 5e-5  # smallest value that four digits show


@click.command("compare")
@click.argument("arguments", nargs=-1, metavar="A [B] FILE")
@click.option("--text", help="Compare on this text instead of a file.")
@click.option(
    "--sampler-a", metavar="OPTIONS", help="Options of sampler A, as 'NAME=VALUE NAME=VALUE'."
)
@click.option("--sampler-b", metavar="OPTIONS", help="Options of sampler B; '' for none.")
@click.option("--fail-above", type=float, help="Exit with code 4 if the metric is above this.")
@choice_option(
    "--metric",
    choices=("kl", "max-kl", "tv", "disagreement"),
    default="kl",
    help="Metric of --fail-above. kl and max-kl are in nats; tv is for samplers.",
)
@click.option("--window", type=click.IntRange(1), help="Context window in tokens.  [default: 1024]")
@integer_option("--worst", default=5, low=0, help="Number of largest differences to show.")
@inputs.model_options
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
) -> None:
    """Compare two models on a text, or two samplers of one model.

    At every position of the text: KL(A ‖ B) of the next-token distributions, and whether the most
    probable token is the same. The models must have the same tokens. With --sampler-a and
    --sampler-b, the distributions that two samplers of one model draw from are compared.

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
        inputs.check_file(file)
    opened = [inputs.open_model(name) for name in names]
    for model in opened:
        inputs.check_window(model, window)
    from lmhead.analysis import compare_models, compare_samplers
    from lmhead.analysis.same_vocabulary import check_same_vocabulary

    pieces = inputs.read_file_or_text(file, text)
    with Progress() as progress:
        progress("Comparing ...")
        if samplers:
            a, b = (sampler_for_model(chain, opened[0]) for chain in chains)
            comparison = compare_samplers(opened[0], a, b, pieces, window=window, worst=worst)
        else:
            with as_usage_errors():
                check_same_vocabulary(opened[0], opened[1])
            comparison = compare_models(opened[0], opened[1], pieces, window=window, worst=worst)
    sides = [repr(s) for s in (a, b)] if samplers else [model.name for model in opened]
    if as_json:
        document: dict[str, Any] = {
            "a": inputs.model_json(opened[0]),
            "b": inputs.model_json(opened[-1]),
        }
        chosen = sides if samplers else [None, None]
        document |= {"sampler_a": chosen[0], "sampler_b": chosen[1]}
        _json.write("compare", **(document | comparison.to_json()))
    else:
        term.echo(_lines(comparison, sides))
    value = {
        "kl": comparison.kl,
        "max-kl": comparison.max_kl,
        "tv": comparison.total_variation or 0.0,
        "disagreement": 1 - comparison.agreement,
    }[metric]
    check_threshold(metric, value, fail_above)


def _names(
    arguments: tuple[str, ...], text: str | None, samplers: bool
) -> tuple[list[str | None], str | None]:
    """Return the models, one for samplers and else two, and the file."""
    names = list(arguments)
    file = None
    if text is None:
        if not names:
            raise click.UsageError("Missing argument 'FILE'.")
        file = names.pop()
    if samplers:
        if len(names) > 1:
            raise click.UsageError("With samplers, give one model, not two.")
        return [names[0] if names else None], file
    if len(names) != 2:
        raise click.UsageError(
            f"Give two models{' and a FILE' if text is None else ''}; got {len(arguments)} "
            "arguments. For two samplers of one model: --sampler-a and --sampler-b."
        )
    return [*names], file


def _lines(comparison: Comparison, sides: list[str]) -> Iterator[str]:
    yield ""
    for letter, name in zip("AB", sides, strict=True):
        yield f"{term.MARGIN}{term.cyan(letter)}  {name}"
    yield ""
    rows = [
        ("KL(A ‖ B)", f"{comparison.kl:.6f}", "nats, mean"),
        ("largest", f"{comparison.max_kl:.6f}", "nats"),
        (
            "same best token",
            f"{comparison.agreement:.2%}",
            f"of {comparison.positions:,} positions",
        ),
    ]
    if comparison.total_variation is not None:
        rows.append(("total variation", f"{comparison.total_variation:.6f}", "mean, from 0 to 1"))
    if comparison.perplexity is not None:
        a, b = comparison.perplexity
        rows.append(("perplexity", f"{a:,.4f}", f"A; {b:,.4f} B"))
    yield from term.facts(rows, 17)
    if comparison.max_kl >= _VISIBLE:
        yield ""
        yield from _differences(comparison)
    yield ""


def _differences(comparison: Comparison) -> Iterator[str]:
    yield term.dim(f"{term.MARGIN}most different  {term.left('A', 16)}{term.left('B', 16)}after")
    for difference in comparison.differences:
        if difference.kl < _VISIBLE:
            break
        labels = (f"{term.clip(term.token_label(x), 9)} {p:.2f}" for x, p in difference.best)
        best = "".join(term.left(label, 16) for label in labels)
        context = term.tail(
            term.one_line(difference.before), term.width() - len(term.MARGIN) - 16 - 32
        )
        yield f"{term.MARGIN}{difference.kl:14.4f}  {best}{term.dim(context)}"
