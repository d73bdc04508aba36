"""`lmhead lens`: the logit lens, as a grid of layers and positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from lmhead.cli import _json
from lmhead.cli import _model_arguments as inputs
from lmhead.cli._terminal import MARGIN, bold, clip, dim, echo, left, right, token_label, width

if TYPE_CHECKING:
    from lmhead.analysis import Cell, Lens

_TOKEN, _P, _RANK, _GAP = 8, 3, 5, 2  # columns of the parts of a cell
_LAYER = 6


@click.command("lens")
@click.argument("arguments", nargs=-1, metavar="[MODEL] PROMPT")
@click.option("-n", "--top", type=click.IntRange(1), default=1, help="Tokens per cell, in JSON.")
@click.option("--target", help="Token whose rank is shown.  [default: the next one]")
@click.option(
    "--ranks/--no-ranks", default=True, help="Show the target's rank, from 1, in every cell."
)
@click.option(
    "--last",
    type=click.IntRange(1),
    help="Number of last positions to show.  [default: as many as fit]",
)
@inputs.model_options
@_json.json_option
def command(
    arguments: tuple[str, ...],
    top: int,
    target: str | None,
    ranks: bool,
    last: int | None,
    as_json: bool,
) -> None:
    """Show what the model predicts after each layer (logit lens).

    Rows are layers, from the embedding to the output; columns are the last positions of the prompt.
    A cell has the most probable token, its probability in percent, and the rank of the target: the
    next token of the prompt, and at the last position the model's own prediction. Ranks start at 1
    in the table, at 0 in JSON.

    PROMPT is a text, or - for standard input.

    \b
    Examples:
      lmhead lens "The capital of France is"
      lmhead lens smollm2 "The capital of France is" --target " Paris"
      lmhead lens smollm2 "one two three" --no-ranks
      lmhead lens ./model "你好" --json --top 5
    """
    where, prompt = inputs.split_arguments(arguments, "PROMPT")
    text = inputs.read_prompt(prompt)
    if target is not None:
        target = inputs.check_utf8(target, "--target")
    model = inputs.open_model(where)
    from lmhead.analysis import logit_lens
    from lmhead.analysis.token_text import find_token

    id = None if target is None else find_token(model, target)
    if target is not None and id is None:
        raise click.UsageError(
            f"--target must be one token of the model, such as ' the'; {target!r} is not."
        )
    lens = logit_lens(model, text, top=min(top, model.head.vocab_size), target=id)
    if as_json:
        _json.write("lens", lines=3, model=inputs.model_json(model), **lens.to_json())
    else:
        echo(_lines(lens, ranks, last))


def _lines(lens: Lens, ranks: bool, last: int | None) -> Iterator[str]:
    cell = _TOKEN + _P + (_RANK if ranks else 0) + _GAP
    fits = (width() + _GAP - len(MARGIN) - _LAYER) // cell
    count = min(max(fits, 1), last or len(lens.prompt), len(lens.prompt))
    places = range(len(lens.prompt) - count, len(lens.prompt))

    yield ""
    heads = [bold(left(clip(token_label(lens.prompt[i]), cell - 2), cell)) for i in places]
    yield MARGIN + left("", _LAYER) + "".join(heads)
    names = [dim(left("→ " + clip(token_label(lens.targets[i]), cell - 4), cell)) for i in places]
    yield MARGIN + dim(left("layer", _LAYER)) + "".join(names)
    yield ""
    names_of_rows = ["emb", *map(str, range(1, len(lens.cells) - 1)), "out"]
    for name, row in zip(names_of_rows, lens.cells, strict=False):
        cells = (" " * _GAP).join(_cell(row[i], lens.targets[i].id, ranks) for i in places)
        yield MARGIN + dim(left(name, _LAYER)) + cells
    yield ""
    missing = len(lens.prompt) - count
    if missing:
        yield dim(f"{MARGIN}The first {missing} positions are not shown.")
    legend = ", rank of the target from 1" if ranks else ""
    yield dim(f"{MARGIN}Each cell: best token, its probability in %{legend}.")


def _cell(cell: Cell, target: int, ranks: bool) -> str:
    piece, p = cell.best[0]
    label = left(clip(token_label(piece), _TOKEN - 1), _TOKEN)
    percent = right(f"{100 * p:.0f}", _P)
    hit = piece.id == target
    if hit:
        label = click.style(label, fg="green", bold=True)
    elif p < 0.1:
        label = dim(label)
    if not ranks:
        return label + dim(percent)
    rank = right(short(cell.target_rank + 1), _RANK)
    if hit or cell.target_rank < 10:
        rank = click.style(rank, fg="green" if hit else "yellow")
    return label + dim(percent) + rank


def short(number: int) -> str:
    """Format a number in at most four columns.

    >>> short(0), short(942), short(1234), short(49151), short(262143)
    ('0', '942', '1.2k', '49k', '262k')
    """
    if number < 1000:
        return str(number)
    return f"{number / 1000:.1f}k" if number < 9950 else f"{number // 1000}k"
