"""Write docs/commands.md from the help pages: `python -m lmhead.cli._commands_page`.

A test checks that the page is up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from lmhead.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "commands.md"
_INTRO = """# Commands

Generated from the help pages by `python -m lmhead.cli._commands_page`; do not edit by hand.

Every command has `--help`, most have `--json` (see [json.md](json.md)). `-` as a text or a prompt
reads standard input. Progress is shown on standard error if that is a terminal. `NO_COLOR=1` turns
colours off, `LMHEAD_TRACEBACK=1` shows where an error was raised.

| code | meaning |
|---|---|
| 0 | success |
| 1 | failure: no result, or the output could not be written |
| 2 | usage error |
| 3 | a model or a file cannot be read |
| 4 | a threshold failed (`--fail-above`, `check`) |
| 130 | interrupted by Ctrl-C |
| 143 | terminated by SIGTERM, after a checkpoint (`lmhead train`) |

`[MODEL]` may be omitted: the default is `smollm2` if it is installed, else `tiny`, which comes with
lmhead.
"""


def page() -> str:
    """Return the whole page."""
    settings = {"terminal_width": 80, "max_content_width": 80, **main.context_settings}
    pages = _help_of(main, click.Context(main, info_name="lmhead", **settings))
    return _INTRO + "".join(f"\n## {name}\n\n```\n{text}\n```\n" for name, text in pages)


def _help_of(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    # A command caches its --help option, which may have been made without our settings.
    vars(command)["_help_option"] = None
    lines = command.get_help(context).splitlines()
    yield context.command_path, "\n".join(line.rstrip() for line in lines)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            if (inner := command.get_command(context, name)) is None:
                continue
            yield from _help_of(inner, click.Context(inner, parent=context, info_name=name))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
