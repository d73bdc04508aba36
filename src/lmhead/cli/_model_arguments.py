"""Arguments shared by commands: model, prompt, text.

The model may be omitted: `lmhead next "The capital of"` uses the default one. A text is a file, `-`
for standard input, or --text.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from lmhead.cli._command_group import FileError, combine_options, importing
from lmhead.progress import Progress, show_reads
from lmhead.user_cache import is_offline

if TYPE_CHECKING:
    from lmhead.models import LanguageModel

_BLOCK = 1 << 16
_MAX_PROMPT = 1 << 24  # characters of a prompt, so that an endless input ends
_CHECKED_BYTES = 8000  # bytes: a NUL among them means that this is no text
MAX_THREADS = 1024  # OpenMP crashes if it cannot start all threads
NAMED = ("smollm2", "tiny")  # as in lmhead.models.bundled, not imported to keep start-up fast


def _keep(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    """Keep the value of an option for `open_model`; refuse --download without the network."""
    if option.name == "download" and value and is_offline():
        raise click.UsageError("--download cannot be used with --offline or LMHEAD_OFFLINE=1.")
    ctx.meta[f"{__name__}.{option.name}"] = value


def kept(name: str) -> Any:
    """Return the value of "threads", "download" or "engine"; None if the command lacks it."""
    ctx = click.get_current_context(silent=True)
    return None if ctx is None else ctx.meta.get(f"{__name__}.{name}")


_kept_option = partial(click.option, expose_value=False, callback=_keep)
threads_option = _kept_option(
    "--threads", type=click.IntRange(1, MAX_THREADS), help="Number of threads.  [default: torch's]"
)
model_options: Callable[[Any], Any] = combine_options(
    threads_option,
    _kept_option("--download", is_flag=True, help="Allow downloading the model."),
    _kept_option(
        "--engine",
        type=click.Choice(("core", "torch", "llama.cpp")),  # as in lmhead.models.language_model
        help="What computes the model's body; llama.cpp needs a GGUF file and the package "
        "xllamacpp.  [default: core where it can, else torch]",
    ),
)


def set_threads() -> None:
    """Import torch and set the number of threads that was given."""
    import torch

    if (threads := kept("threads")) is not None:
        torch.set_num_threads(threads)


def open_model(where: str | None) -> LanguageModel:
    """Import torch and open the model, as `model_options` say; None for the default one."""
    with Progress() as progress:
        progress("Loading torch ...")
        with importing():
            from lmhead.models import open_model as open_any
        set_threads()
        progress(f"Opening {where or 'the default model'} ...")
        with show_reads(progress):
            return open_any(where, download=bool(kept("download")), engine=kept("engine"))


def open_models(places: tuple[str, ...]) -> tuple[dict[str, LanguageModel], dict[str, str]]:
    """Open models, or the default one; return them, and where each is, by a unique name."""
    opened: dict[str, LanguageModel] = {}
    given: dict[str, str] = {}
    for where in places or (None,):
        model = open_model(where)
        base = Path(model.name or where or "model").name or "model"
        names = [base, *(f"{base} ({n})" for n in range(2, len(opened) + 2))]
        name = next(name for name in names if name not in opened)
        opened[name], given[name] = model, where or name
    return opened, given


def model_json(model: LanguageModel) -> dict[str, Any]:
    """Return the model's entry in a JSON document."""
    return {
        "name": model.name,
        "vocab_size": model.head.vocab_size,
        "hidden_size": model.head.hidden_size,
        "max_length": model.max_length,
        "engine": model.engine,
    }


def split_arguments(arguments: tuple[str, ...], last: str) -> tuple[str | None, str]:
    """Split `[MODEL] LAST` into both; a single argument is LAST."""
    if not arguments:
        raise click.UsageError(f"Missing argument '{last}'.")
    if len(arguments) > 2:
        raise click.UsageError(
            f"Got {len(arguments)} arguments; expected at most MODEL and {last}. "
            "Put quotes around a text with spaces."
        )
    if len(arguments) == 2:
        return arguments[0], arguments[1]
    (only,) = arguments
    if only in NAMED or (last != "FILE" and Path(only).suffix in (".gguf", ".bin")):
        raise click.UsageError(f"Missing argument '{last}': {only} is a model.")
    return None, only


def read_prompt(prompt: str) -> str:
    """Return the prompt; `-` reads standard input, without the last newline."""
    if prompt == "-":
        text = ""
        for piece in read_text("-"):
            text += piece
            if len(text) > _MAX_PROMPT:
                raise FileError(f"standard input must have at most {_MAX_PROMPT:,} characters.")
        return text.removesuffix("\n").removesuffix("\r")
    return check_utf8(prompt, "PROMPT")


def check_utf8(text: str, name: str) -> str:
    """Return a text from the command line, or refuse invalid UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise click.UsageError(f"{name} must be UTF-8; character {error.start} is not.") from None
    return text


def read_text(where: str) -> Iterator[str]:
    """Yield a file, or `-` for standard input, in pieces, with newlines unchanged."""
    try:
        if where == "-":
            yield from _decode(standard_input(), "standard input")
        else:
            with Path(where).open("rb") as file:
                yield from _decode(file, where)
    except OSError as error:
        name = "standard input" if where == "-" else where or "''"
        raise FileError(f"{name} cannot be read: {error.strerror}.") from None


def read_file_or_text(file: str | None, text: str | None) -> Iterable[str]:
    """Return the pieces of a file, or of --text."""
    return [check_utf8(text or "", "--text")] if file is None else read_text(file)


def standard_input() -> BinaryIO:
    """Return standard input as bytes, or refuse a closed one."""
    if sys.stdin is None:
        raise FileError("standard input is closed.")
    return sys.stdin.buffer


def check_file(where: str) -> None:
    """Refuse a file that cannot be read, before a model is loaded."""
    if where == "-":
        standard_input()
    elif Path(where).is_file() or not Path(where).exists():  # a pipe can be read only once
        next(read_text(where), None)


def check_window(model: LanguageModel, window: int | None) -> None:
    """Refuse a --window longer than the model's context."""
    limit = model.max_length
    if window is not None and limit is not None and window > limit:
        raise click.UsageError(
            f"--window must be at most {limit}, the context length of {model.name}; got {window}"
        )


def _decode(file: BinaryIO, name: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    while True:
        block = file.read(_BLOCK)
        if not done and b"\0" in block[:_CHECKED_BYTES]:
            raise FileError(f"{name} must be text; byte {block.index(0):,} is NUL.")
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            place = done - pending + error.start
            raise FileError(
                f"{name} must be text in UTF-8; byte {place:,} is not. "
                "(iconv -f latin1 -t utf-8 may help.)"
            ) from None
        done += len(block)
        if text:
            yield text
        if not block:
            return
