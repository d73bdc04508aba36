"""Plain-terminal drawing: columns that line up in any script, and bars. Nothing but strings.

A Chinese character takes two columns, so `len` does not line tables up; `columns` does.
"""

import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence

import click

_TRAILING = re.compile(r" +((?:\x1b\[[0-9;]*m| )*)$", re.MULTILINE)
_EIGHTHS = " ▏▎▍▌▋▊▉"
_PLAIN = str.maketrans("█▉▊▋▌▍▎▏│▲·×␣…‖", "#####   |^*x_~|")


def columns(text: str) -> int:
    """How many terminal columns the text takes, colours not counted.

    >>> columns("love"), columns("爱"), columns(click.style("爱", bold=True))
    (4, 2, 2)
    """
    return sum(map(_columns, click.unstyle(text)))


def _columns(c: str) -> int:
    if unicodedata.category(c) in ("Mn", "Me", "Cf"):  # on the letter before, or not seen
        return 0
    return 1 + (unicodedata.east_asian_width(c) in ("W", "F"))


def clip(text: str, width: int) -> str:
    """The text, cut to a width; what is missing is an ellipsis.

    >>> clip("understanding", 6), clip("音乐会", 5), clip("猫", 2)
    ('under…', '音乐…', '猫')
    """
    if columns(text) <= width:
        return text
    kept, used = "", 1
    for c in text:
        used += _columns(c)
        if used > width:
            break
        kept += c
    return kept + "…"


def tail(text: str, width: int) -> str:
    """The end of a text that fits a width; what is missing is an ellipsis.

    >>> tail("understanding", 6), tail("音乐会", 5), tail("猫", 2)
    ('…nding', '…乐会', '猫')
    """
    if columns(text) <= width:
        return text
    while text and columns(text) > width - 1:
        text = text[1:]
    return "…" + text


def left(text: str, width: int) -> str:
    """The text, filled up on the right.

    >>> left("猫", 4) + "|"
    '猫  |'
    """
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    """The text, filled up on the left.

    >>> right("猫", 4)
    '  猫'
    """
    return " " * (width - columns(text)) + text


def center(text: str, width: int) -> str:
    """The text in the middle, or nothing where it does not fit.

    >>> center("猫", 6), center("音乐", 3)
    ('  猫  ', '   ')
    """
    if columns(text) > width:
        return " " * width
    before = (width - columns(text)) // 2
    return left(" " * before + text, width)


def table(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """One line per row. A width below 0 aligns its column to the left; 0 lets it run free.

    >>> table([["猫", "0.5", "██"], ["music", "10", "█"]], [-7, 4, 0])
    ['猫      0.5   ██', 'music    10   █']
    """
    lines = []
    for cells in rows:
        line = ""
        for cell, width in zip(cells, widths, strict=True):
            if width > 0:
                line += right(cell, width)
            elif width < 0:
                line += left(cell, -width)
            else:
                line += "   " + cell
        lines.append(line.rstrip())
    return lines


def bar(share: float, width: int) -> str:
    """A bar of `share` of the width, drawn to an eighth of a column.

    >>> bar(0.5, 8), bar(0.55, 8), bar(0.0, 8)
    ('████', '████▍', '')
    """
    whole, eighth = divmod(round(share * width * 8), 8)
    return "█" * whole + (_EIGHTHS[eighth] if eighth else "")


def signed_bar(value: float, width: int) -> str:
    """A bar to the left of an axis for a negative value, to the right for a positive one.

    `value` is in [-1, 1]; each side has `width` columns.

    >>> signed_bar(0.5, 4), signed_bar(-0.5, 4)
    ('    │██', '  ██│')
    """
    if value < 0:  # there are no eighths that begin at the right
        return right("█" * round(-value * width), width) + "│"
    return " " * width + "│" + bar(value, width)


def printable(text: str) -> str:
    """The text as the terminal can show it: where it knows no such bars, plain ones."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text


def width() -> int:
    """How many columns there are: the terminal's, or 80."""
    return max(40, shutil.get_terminal_size().columns)


def echo(lines: Iterable[str] | str = "") -> None:
    """Print lines to standard output, in colour where it is a terminal and NO_COLOR is not set."""
    text = lines if isinstance(lines, str) else "\n".join(lines)
    text = _TRAILING.sub(r"\1", printable(text))
    click.echo(text, color=False if os.environ.get("NO_COLOR") else None)


def cyan(text: str) -> str:
    """For bars."""
    return click.style(text, fg="cyan")


def dim(text: str) -> str:
    """For headings, and what matters less."""
    return click.style(text, dim=True)


def bold(text: str) -> str:
    """For what matters."""
    return click.style(text, bold=True)


class Progress:
    """One line on standard error that changes as the work goes on; nothing if it is no terminal."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty()

    def __enter__(self) -> "Progress":
        return self

    def __call__(self, text: str) -> None:
        """Say what is being done."""
        if self.shown:
            click.echo(f"\r\x1b[2K{clip(text, width() - 1)}", err=True, nl=False)

    def __exit__(self, *_: object) -> None:
        self("")
