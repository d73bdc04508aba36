"""What commands are about: a model, a prompt, a text. How each is named on the command line.

A model may be left out: `lmhead next "The capital of"` takes the default one. A text is a file,
`-` for standard input, or --text.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from lmhead.cli._frame import Unreadable, chain
from lmhead.cli._terminal import Progress
from lmhead.interrupt import leaving_at_once

if TYPE_CHECKING:
    from lmhead.models import LanguageModel

_BLOCK = 1 << 16
NAMED = ("smollm2", "tiny")  # as in lmhead.models.bundled, which is not loaded for it

model_options: Callable[[Any], Any] = chain(
    click.option("--threads", type=click.IntRange(1), help="Threads.  [default: torch's]"),
    click.option(
        "--download", is_flag=True, help="Let a model be fetched that is not on this machine."
    ),
)


def open_model(where: str | None, *, download: bool, threads: int | None) -> LanguageModel:
    """Load torch, and open the model; None for the default one."""
    with Progress() as progress:
        progress("Loading torch ...")
        with leaving_at_once():
            import torch

            from lmhead import models
        if threads is not None:
            torch.set_num_threads(threads)
        progress(f"Opening {where or 'the default model'} ...")
        return models.open_model(where, download=download)


def model_json(model: LanguageModel) -> dict[str, Any]:
    """What a document says of the model."""
    return {
        "name": model.name,
        "vocab_size": model.head.vocab_size,
        "hidden_size": model.head.hidden_size,
        "max_length": model.max_length,
    }


def split(arguments: tuple[str, ...], last: str, names: str = "MODEL") -> tuple[str | None, str]:
    """[MODEL] LAST: one argument is the last one, and the model the default one."""
    if not arguments:
        raise click.UsageError(f"Missing argument '{last}'.")
    if len(arguments) > 2:
        raise click.UsageError(
            f"Got {len(arguments)} arguments; {names} and {last} are all there is. "
            "Put quotes around a text with spaces."
        )
    if len(arguments) == 1:
        _check_not_a_model(arguments[0], last)
        return None, arguments[0]
    return arguments[0], arguments[1]


def _check_not_a_model(argument: str, last: str) -> None:
    """A single argument that is a model: the other one was forgotten."""
    if argument in NAMED or (last != "FILE" and Path(argument).suffix in (".gguf", ".bin")):
        raise click.UsageError(f"Missing argument '{last}': {argument} is a model.")


def read_prompt(prompt: str) -> str:
    """The prompt itself; `-` for standard input, without the newline at its end."""
    if prompt == "-":
        text = "".join(read_text("-"))
        return text.removesuffix("\n").removesuffix("\r")
    return checked_text(prompt, "PROMPT")


def checked_text(text: str, name: str) -> str:
    """Text from the command line: bytes that were no UTF-8 would break later, and far from here."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise click.UsageError(f"{name} must be UTF-8; it is not at {error.start}.") from None
    return text


def read_text(where: str) -> Iterator[str]:
    """A file, or `-` for standard input, piece by piece, every newline as it stands."""
    if where == "-":
        yield from _decode(sys.stdin.buffer, "standard input")
        return
    path = Path(where)
    try:
        with path.open("rb") as file:
            yield from _decode(file, where)
    except OSError as error:
        raise Unreadable(f"{where} cannot be read: {error.strerror}.") from None


def check_file(where: str) -> None:
    """Refuse a file that cannot be read before a model is loaded for it."""
    if where != "-":
        for _ in read_text(where):
            return


def check_window(model: LanguageModel, window: int | None) -> None:
    """Refuse a --window that the model cannot see."""
    most = model.max_length
    if window is not None and most is not None and window > most:
        raise click.UsageError(
            f"--window must be at most {most}, what {model.name} can see; got {window}"
        )


def _decode(file: BinaryIO, name: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    while True:
        block = file.read(_BLOCK)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            place = done - pending + error.start
            raise Unreadable(
                f"{name} must be text in UTF-8; byte {place:,} is not. "
                "(iconv -f latin1 -t utf-8 may help.)"
            ) from None
        done += len(block)
        if text:
            yield text
        if not block:
            return
