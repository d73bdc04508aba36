"""Shared by all commands: lazy loading, exit codes, errors in one line, pipes, Ctrl-C.

    0    success
    1    failure: no result, or the output could not be written
    2    usage error
    3    a model or a file cannot be read
    4    a threshold failed (`compare --fail-above`)
    130  interrupted

A user error is printed as one line; LMHEAD_TRACEBACK=1 shows where it was raised. An unexpected
exception keeps its traceback: it is a bug.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from lmhead import __version__
from lmhead.errors import ModelError
from lmhead.progress import INTERRUPTED, exit_on_interrupt

FAILED, FILE_ERROR, THRESHOLD = 1, 3, 4

# Types of options for paths; neither needs to exist.
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)

# Command name -> its line in `lmhead --help`.
_COMMANDS = {
    "demo": "Show what lmhead does, on a real model, in under a minute.",
    "next": "Show the most probable next tokens after a prompt.",
    "score": "Score a text: perplexity, bits per byte, every token.",
    "eval": "Evaluate a model on tasks of lm-evaluation-harness.",
    "generate": "Generate text from a prompt.",
    "lens": "Show what the model predicts after each layer (logit lens).",
    "compare": "Compare two models, or two samplers, on a text.",
    "train": "Train a language model on text, or a translation model on pairs.",
    "translate": "Translate sentences with a translation model.",
    "distill-cache": "Write a teacher's hidden states of a text, for distillation.",
    "inspect": "Show a model's head: sizes, dtype, memory, advice.",
    "check": "Check a model's head against the float64 reference.",
    "models": "List, install and locate models that have a name.",
    "cache": "List and remove what lmhead keeps in its cache folder.",
    "serve": "Serve models with an OpenAI-compatible API.",
    "explore": "Explore models in the browser, on this machine only.",
    "doctor": "Show versions, threads, instruction sets, compiled core.",
    "bench": "Measure speed, memory and errors against alternatives (needs a clone).",
}

_F = TypeVar("_F", bound=Callable[..., Any])


class FileError(click.ClickException):
    """A file cannot be read."""

    exit_code = FILE_ERROR


class LazyGroup(click.Group):
    """A group that imports a command only when it is run, so that `--help` is fast.

    Args:
        lazy: {command: its help line}; `lmhead NAME` runs `lmhead.cli.cmd_NAME:command`.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names, in order."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return the command."""
        if cmd_name not in self.lazy:
            return None
        module = f"lmhead.cli.cmd_{cmd_name.replace('-', '_')}"
        command: click.Command = import_module(module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a line; a name that does not exist is refused with a similar one."""
        if args and args[0] not in self.lazy and not args[0].startswith("-"):
            similar = get_close_matches(args[0].lower(), self.lazy, n=1)
            hint = f" Did you mean {similar[0]!r}?" if similar else ""
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the list of commands in `--help`."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.lazy.items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and exit with its code."""
        given = {"args": args, "prog_name": prog_name, "complete_var": complete_var, **extra}
        if not standalone_mode:
            return super().main(standalone_mode=False, **given)
        try:
            result = super().main(standalone_mode=False, **given)
            code = result if isinstance(result, int) else 0
            if sys.stdout is not None:  # None if it was closed from the start
                sys.stdout.flush()
        except BrokenPipeError:
            code = FAILED
            _silence_stdout()
        except click.ClickException as error:
            _maybe_traceback()
            with suppress(OSError):  # standard error is closed or full; the code still tells
                error.show()
            code = error.exit_code
        except click.Abort:
            with suppress(OSError):
                click.echo("Interrupted.", err=True)
            code = INTERRUPTED
        except ModelError as error:
            code = _print_error(error, FILE_ERROR)
        except (ValueError, MemoryError) as error:
            code = _print_error(error, FAILED)
        except OSError as error:  # e.g. a full disk
            code = _print_error(error, FAILED)
            _silence_stdout()
        except RuntimeError as error:
            if "allocate memory" not in str(error):  # torch has no exception class for it
                raise
            code = _print_error(MemoryError("not enough memory"), FAILED)
        sys.exit(code)


class SectionedCommand(click.Command):
    """A command whose `--help` groups options by their `section`."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those without a section first."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                section = getattr(parameter, "section", "Options")
                sections.setdefault(section, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)


class SectionedOption(click.Option):
    """An option listed under its own heading."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


@contextmanager
def importing() -> Iterator[None]:
    """Import modules: Ctrl-C ends the process, and the garbage collector does not run.

    Torch creates many objects that stay: looking through them again and again takes a sixth of the
    start-up time.
    """
    enabled, first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        with exit_on_interrupt():
            yield
    finally:
        if enabled:
            gc.enable()
    if first:
        gc.freeze()  # later collections leave these objects out


@contextmanager
def importing_server(extra: str) -> Iterator[None]:
    """Import the server; without its packages, an error says which extra has them."""
    try:
        with importing():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        message = f"{error.name} is not installed; run: pip install 'lmhead[{extra}]'"
        raise click.ClickException(message) from None


@contextmanager
def as_usage_errors() -> Iterator[None]:
    """Turn `ValueError` and `TypeError` into usage errors (exit code 2)."""
    try:
        yield
    except ModelError:  # about a model, not an option
        raise
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error


def check_threshold(what: str, value: float, limit: float | None) -> None:
    """Exit with code 4 if the value is above the limit, or NaN."""
    if limit is not None and not value <= limit:
        click.echo(f"Failed: {what} is {value:.6g}, above {limit:g}.", err=True)
        raise SystemExit(THRESHOLD)


def integer_option(
    *names: str, default: int, help: str, low: int = 1, high: int | None = None
) -> Callable[[_F], _F]:
    """Return an option for an integer in [low, high] whose default is shown in the help."""
    kind = click.IntRange(low, high)
    return click.option(*names, type=kind, default=default, show_default=True, help=help)


def choice_option(
    *names: str, choices: Sequence[str], help: str, default: str | None = None
) -> Callable[[_F], _F]:
    """Return an option for one of several values; a default is shown in the help."""
    kind, shown = click.Choice(choices), default is not None
    return click.option(*names, type=kind, default=default, show_default=shown, help=help)


def combine_options(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Combine several options into one decorator, listed in this order."""

    def add(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def _print_error(error: BaseException, code: int) -> int:
    _maybe_traceback()
    text = str(getattr(error, "strerror", None) or error) or type(error).__name__
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {text}"
    with suppress(OSError):
        click.echo(f"Error: {_sentence(text)}", err=True)
    return code


def _sentence(text: str) -> str:
    """Capitalize the first letter, unless the text starts with the name of a file or an option."""
    first = text.split(" ", 1)[0].rstrip(":,")
    if not first.isalpha() or Path(first).exists():
        return text
    return f"{text[:1].upper()}{text[1:]}"


def _maybe_traceback() -> None:
    if os.environ.get("LMHEAD_TRACEBACK"):
        import traceback

        traceback.print_exc()


def _silence_stdout() -> None:
    """Point standard output to /dev/null: the flush at exit would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command(
    cls=LazyGroup, lazy=_COMMANDS, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.option("--offline", is_flag=True, help="Never use the network; LMHEAD_OFFLINE=1 too.")
@click.version_option(__version__, prog_name="lmhead")
def main(offline: bool) -> None:
    """The output layer of a language model.

    Hidden states in; loss, log-probabilities and next token out, without a logits tensor in memory.
    """  # noqa: D401
    if offline:  # for this process, its children and the libraries of Hugging Face
        names = ("LMHEAD_OFFLINE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
        os.environ.update(dict.fromkeys(names, "1"))
