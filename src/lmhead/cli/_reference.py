"""The command reference, made from the help pages: `python -m lmhead.cli._reference`.

In:  the commands.
Out: docs/commands.md; a test sees that it is up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from lmhead.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"
_INTRO = """# Commands

Made from the help pages by `python -m lmhead.cli._reference`; do not edit it by hand.

Every command has `--help`. Those that answer a question have `--json` (see [json.md](json.md));
where a text or a prompt is wanted, `-` is standard input. Progress is shown on standard error, if
that is a terminal. `NO_COLOR=1` turns colours off, `LMHEAD_TRACEBACK=1` shows where an error came
from.

| code | meaning |
|---|---|
| 0 | done |
| 1 | it failed: an answer cannot be given, or the output was closed before its end |
| 2 | a mistake in the command |
| 3 | a model or a file that cannot be read |
| 4 | a threshold failed (`--fail-above`) |
| 130 | interrupted |
| 143 | ended by SIGTERM, after a checkpoint (`lmhead train`) |

Where a command takes `[MODEL]`, it may be left out: the default is `smollm2` if it is installed,
else `tiny`, which comes with lmhead.
"""


def page() -> str:
    """The whole reference."""
    return _INTRO + "".join(f"\n## {name}\n\n```\n{text}\n```\n" for name, text in _pages())


def _pages() -> Iterator[tuple[str, str]]:
    settings = {"terminal_width": 80, "max_content_width": 80, **main.context_settings}
    top = click.Context(main, info_name="lmhead", **settings)
    yield from _of(main, top)


def _of(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    # A command keeps the option --help of its first call, which may have been without our settings.
    vars(command)["_help_option"] = None
    lines = command.get_help(context).splitlines()
    yield context.command_path, "\n".join(line.rstrip() for line in lines)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _of(inner, click.Context(inner, parent=context, info_name=name))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
