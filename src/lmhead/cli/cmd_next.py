"""`lmhead next`: the most probable next tokens, before and after a sampler."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli import _model_arguments as inputs
from lmhead.cli import _terminal as term
from lmhead.cli._command_group import SectionedCommand, integer_option
from lmhead.cli._sampler_arguments import (
    given_sampler_options,
    make_sampler,
    sampler_for_model,
    sampler_options,
)

if TYPE_CHECKING:
    from lmhead.analysis import NextTokens
    from lmhead.models import LanguageModel


@click.command("next", cls=SectionedCommand)
@click.argument("arguments", nargs=-1, metavar="[MODEL] PROMPT")
@integer_option("-n", "--top", default=10, help="Number of tokens to show.")
@click.option(
    "--prompt-length",
    type=click.IntRange(0),
    help="Number of tokens of PROMPT that are the prompt; penalties that count generated tokens "
    "count the rest.  [default: all]",
)
@inputs.model_options
@_json.json_option
@sampler_options
def command(
    arguments: tuple[str, ...], top: int, prompt_length: int | None, as_json: bool, **options: Any
) -> None:
    """Show the most probable next tokens after a prompt.

    Each token with its id, logit and probability. With sampler options also the probability after
    sampling, and for each removed token the option that removed it.

    PROMPT is a text, or - for standard input.

    \b
    Examples:
      lmhead next "The capital of France is"
      lmhead next smollm2 "The capital of France is" --top 20
      lmhead next smollm2 "Once upon a" --temperature 0.8 --top-p 0.9
      lmhead next ./model "中国的首都是" --json
      echo "To be or not to" | lmhead next -
    """
    where, prompt = inputs.split_arguments(arguments, "PROMPT")
    text = inputs.read_prompt(prompt)
    given = given_sampler_options(options)
    if given:
        given.setdefault("seed", 0)
        make_sampler(given)
    model = inputs.open_model(where)
    from lmhead.analysis import next_tokens
    from lmhead.analysis.token_text import prompt_ids

    sampler = sampler_for_model(given, model) if given else None
    if prompt_length is not None and prompt_length > (n := len(prompt_ids(model, text))):
        raise click.UsageError(
            f"--prompt-length must be at most {n}, the tokens of PROMPT; got {prompt_length}"
        )
    result = next_tokens(model, text, top=top, sampler=sampler, prompt_length=prompt_length)
    if as_json:
        _json.write("next", model=inputs.model_json(model), **result.to_json())
    else:
        term.echo(_lines(model, result))


def _lines(model: LanguageModel, result: NextTokens) -> Iterator[str]:
    yield ""
    prompt = term.tail(term.one_line(result.prompt).strip(), term.width() - len(term.MARGIN) - 4)
    yield term.MARGIN + term.bold(prompt) + term.cyan(" ___")
    yield ""
    yield from _table(result)
    yield ""
    facts = list(_summary(result))
    names = max(term.columns(name) for name, _ in facts)
    yield from (f"{term.MARGIN}{term.dim(term.left(name, names))}  {fact}" for name, fact in facts)
    yield ""
    yield term.dim(f"{term.MARGIN}{model.name}: {result.vocab_size:,} tokens in the vocabulary")


def _table(result: NextTokens) -> Iterator[str]:
    sampled = result.processed is not None
    heads = ["token", "id", "logit", "p", *(["sampler", "removed by"] if sampled else [])]
    rows = []
    for token in result.tokens:
        cells = [
            term.token_label(token.piece),
            str(token.piece.id),
            f"{token.logit:.3f}",
            probability(token.p),
        ]
        if sampled:
            after = "" if token.cut_by else probability(token.processed_p)
            cells += [after, token.cut_by or ""]
        rows.append(cells)
    widths = [max(term.columns(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    bars = max(8, min(30, term.width() - len(term.MARGIN) - sum(widths[1:]) - 2 * len(widths) - 12))
    widths[0] = max(5, term.width() - len(term.MARGIN) - sum(widths[1:]) - 2 * len(widths) - bars)
    widths[0] = min(widths[0], max(term.columns(row[0]) for row in [heads, *rows]))
    yield term.dim(term.MARGIN + _row(heads, widths, ""))
    best = max(token.processed_p for token in result.tokens) or 1.0
    for token, cells in zip(result.tokens, rows, strict=True):
        drawn = term.bar(token.processed_p / best, bars)
        cells[0] = term.clip(cells[0], widths[0])
        line = term.MARGIN + _row(cells, widths, term.cyan(drawn) if drawn else "")
        yield term.dim(click.unstyle(line)) if token.cut_by else line


def _row(cells: list[str], widths: list[int], drawn: str) -> str:
    """Align text to the left and numbers to the right; append the bar."""
    sides = (term.left, term.right, term.right, term.right, term.right, term.left)
    parts = [side(cell, w) for side, cell, w in zip(sides, cells, widths, strict=False)]
    return "  ".join([*parts, drawn]).rstrip()


def probability(p: float) -> str:
    """Format a probability with four digits, or with an exponent if it is small.

    >>> probability(0.7734), probability(0.00001234), probability(0.0)
    ('0.7734', '1.2e-05', '0')
    """
    if p == 0:
        return "0"
    return f"{p:.4f}" if p >= 0.0005 else f"{p:.1e}"


def _summary(result: NextTokens) -> Iterator[tuple[str, str]]:
    bits = result.entropy / math.log(2)
    yield "entropy", f"{result.entropy:.3f} nats ({bits:.3f} bits)"
    yield "covered", f"{result.mass:.2%} of the probability, by these {len(result.tokens)} tokens"
    if result.processed is None:
        return
    for step in result.processed.steps[1:]:
        removed = f"{step.cut:,} tokens, {step.cut_mass:.2%}" if step.cut else "no token"
        yield step.stage, f"removes {removed}"
    kept = result.processed
    yield "left", f"{kept.kept:,} tokens, with {kept.mass:.2%} of the model's probability"
    yield "entropy", f"{kept.entropy:.3f} nats ({kept.entropy / math.log(2):.3f} bits)"
