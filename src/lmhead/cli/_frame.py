"""The frame around all commands: exit codes, errors without tracebacks, pipes, Ctrl-C.

    0    done
    1    it failed: an answer cannot be given, or the output was closed before its end
    2    a mistake in the command
    3    a model or a file that cannot be read
    4    a threshold failed (`compare --fail-above`)
    130  interrupted

A user's mistake is told in a sentence; LMHEAD_TRACEBACK=1 shows where it came from. What nobody
expected keeps its traceback: it is a bug.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, TypeVar

import click

from lmhead.errors import ModelError
from lmhead.interrupt import INTERRUPTED

FAILED, UNREADABLE, THRESHOLD = 1, 3, 4

_F = TypeVar("_F", bound=Callable[..., Any])


class Unreadable(click.ClickException):
    """A file that cannot be read."""

    exit_code = UNREADABLE


class LazyGroup(click.Group):
    """A group that imports a command only when it is run, so that `--help` is instant.

    Args:
        lazy: {command: what `--help` says of it}; `lmhead NAME` runs `lmhead.cli.NAME:command`.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The names, in their order."""
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command, loaded now."""
        if cmd_name not in self.lazy:
            return None
        command: click.Command = import_module(f"lmhead.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list in `--help`."""
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
        """Run a command and leave with its code."""
        given = {"args": args, "prog_name": prog_name, "complete_var": complete_var, **extra}
        if not standalone_mode:
            return super().main(standalone_mode=False, **given)
        try:
            result = super().main(standalone_mode=False, **given)
            code = result if isinstance(result, int) else 0
            if sys.stdout is not None:  # it is None where it was closed from the start
                sys.stdout.flush()
        except BrokenPipeError:
            code = FAILED
            _hush()
        except click.ClickException as error:
            _maybe_traceback()
            error.show()
            code = error.exit_code
        except click.Abort:
            click.echo("Interrupted.", err=True)
            code = INTERRUPTED
        except ModelError as error:
            code = _say(error, UNREADABLE)
        except (ValueError, MemoryError) as error:
            code = _say(error, FAILED)
        except OSError as error:  # a full disk, say
            code = _say(error, FAILED)
            _hush()
        sys.exit(code)


class SectionedCommand(click.Command):
    """A command whose `--help` puts options that have a `section` under its own heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, those without a section first."""
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
    """An option under a heading of its own."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


@contextmanager
def options_checked() -> Iterator[None]:
    """What is wrong with an option's value is a mistake in the command."""
    try:
        yield
    except ModelError:  # which is no matter of options
        raise
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from error


def below_threshold(what: str, value: float, limit: float | None) -> None:
    """Leave with code 4 if the value is above the limit, or is no number."""
    if limit is not None and not value <= limit:
        click.echo(f"Failed: {what} is {value:.6g}, above {limit:g}.", err=True)
        raise SystemExit(THRESHOLD)


def chain(*options: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Several options as one decorator, shown in this order."""

    def add(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def _say(error: BaseException, code: int) -> int:
    _maybe_traceback()
    text = str(getattr(error, "strerror", None) or error) or type(error).__name__
    click.echo(f"Error: {text[:1].upper()}{text[1:]}", err=True)
    return code


def _maybe_traceback() -> None:
    if os.environ.get("LMHEAD_TRACEBACK"):
        import traceback

        traceback.print_exc()


def _hush() -> None:
    """Let the interpreter's last flush go nowhere: it would fail as the one before did."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
