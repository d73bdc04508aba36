"""`lmhead distill-cache`: write a teacher's hidden states of a text to a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lmhead.cli import _json
from lmhead.cli._command_group import FILE, choice_option
from lmhead.cli._model_arguments import check_file, model_json, model_options, open_model, read_text
from lmhead.cli._terminal import echo
from lmhead.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from lmhead.models import LanguageModel


@click.command("distill-cache")
@click.argument("model")
@click.argument("text")
@click.option("--out", type=FILE, required=True, help="File to write.")
@choice_option(
    "--bits", choices=("8", "16", "32"), default="16", help="Bits per number of a hidden state."
)
@click.option("--window", type=click.IntRange(1), help="Tokens the model reads at once.")
@model_options
@_json.json_option
def command(model: str, text: str, out: Path, bits: str, window: int | None, as_json: bool) -> None:
    """Write a teacher's final hidden states of a text, and its head once, for distillation.

    The text is cut into windows that the model reads one by one. The file holds the token ids too;
    read it with lmhead.distill.TeacherFile. It gives the teacher's distribution over the whole
    vocabulary in a small part of the size of its logits.

    TEXT is a file in UTF-8, or - for standard input.

    \b
    Examples:
      lmhead distill-cache smollm2 book.txt --out teacher.lmhead
      lmhead distill-cache smollm2 book.txt --out teacher.lmhead --bits 8 --window 512
    """
    check_file(text)
    if out.exists():
        raise click.UsageError(f"{out} exists; choose another --out.")
    teacher = open_model(model)
    from lmhead import distill
    from lmhead.analysis.score import default_window

    size = default_window(teacher) if window is None else window
    if teacher.max_length is not None and size > teacher.max_length:
        raise click.UsageError(f"--window must be at most {teacher.max_length}; got {size}.")
    with Progress() as progress:
        states = _states(teacher, read_text(text), size, progress)
        info = distill.save(states, out, head=teacher.head, bits=int(bits), window=size)
    if as_json:
        names = ("rows", "bytes", "logits_bytes", "ratio", "kl_bound", "window")
        facts = {"file": str(out), **{name: getattr(info, name) for name in names}}
        _json.write("distill-cache", lines=1, model=model_json(teacher), **facts)
        return
    echo(
        [
            f"{out}: {info.rows:,} tokens, {info.bytes:,} bytes",
            f"float32 logits would be {info.logits_bytes:,} bytes, {info.ratio:,.1f} times as many",
            f"KL divergence by rounding: at most {info.kl_bound:.3g} nats for any token",
        ]
    )


def _states(
    teacher: LanguageModel, pieces: Iterator[str], window: int, progress: Progress
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield hidden states and ids of one window after the other."""
    import torch

    from lmhead.analysis.token_text import hidden_states, stream_ids

    held: list[int] = []
    done = 0

    def part(ids: list[int]) -> tuple[Tensor, Tensor]:
        nonlocal done
        done += len(ids)
        progress(f"{done:,} tokens ...")
        with torch.no_grad():
            return hidden_states(teacher, ids), torch.tensor(ids)

    for portion in stream_ids(teacher, pieces):
        held += portion
        while len(held) >= window:
            yield part(held[:window])
            held = held[window:]
    if held:
        yield part(held)
