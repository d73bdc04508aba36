"""Terminal output: aligned columns in any script, bars, colours, printable tokens.

A Chinese character takes two columns, so tables are aligned by `columns`, not by `len`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from lmhead.analysis import Piece

MARGIN = "  "
_TRAILING = re.compile(r" +((?:\x1b\[[0-9;]*m| )*)$", re.MULTILINE)
_EIGHTHS = " ▏▎▍▌▋▊▉"
_PLAIN = str.maketrans("█▉▊▋▌▍▎▏│▲·×␣…‖", "#####   |^*x_~|")


def columns(text: str) -> int:
    """Return the width of a text in terminal columns, without colour codes.

    >>> columns("love"), columns("爱"), columns(click.style("爱", bold=True))
    (4, 2, 2)
    """
    return sum(map(_columns, click.unstyle(text)))


def _columns(c: str) -> int:
    if unicodedata.category(c) in ("Mn", "Me", "Cf"):  # combining or invisible
        return 0
    return 1 + (unicodedata.east_asian_width(c) in ("W", "F"))


def clip(text: str, width: int) -> str:
    """Return the text cut to a width, with an ellipsis at the end.

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
    """Return the end of a text that fits a width, with an ellipsis at the start.

    >>> tail("understanding", 6), tail("音乐会", 5), tail("猫", 2)
    ('…nding', '…乐会', '猫')
    """
    if columns(text) <= width:
        return text
    while text and columns(text) > width - 1:
        text = text[1:]
    return "…" + text


def left(text: str, width: int) -> str:
    """Align the text to the left of a width.

    >>> left("猫", 4) + "|"
    '猫  |'
    """
    return text + " " * (width - columns(text))


def right(text: str, width: int) -> str:
    """Align the text to the right of a width.

    >>> right("猫", 4)
    '  猫'
    """
    return " " * (width - columns(text)) + text


def center(text: str, width: int) -> str:
    """Centre the text in a width; return spaces if it does not fit.

    >>> center("猫", 6), center("音乐", 3)
    ('  猫  ', '   ')
    """
    if columns(text) > width:
        return " " * width
    before = (width - columns(text)) // 2
    return left(" " * before + text, width)


def table(rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Return one line per row. A negative width aligns left; 0 leaves the cell as it is.

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


def facts(rows: Iterable[tuple[str, str, str]], width: int) -> Iterator[str]:
    """Yield one line per row: a name in `width` columns, a value, and a note."""
    for name, value, note in rows:
        yield f"{MARGIN}{left(name, width)}{right(value, 14)}" + (f"   {dim(note)}" if note else "")


def bar(share: float, width: int) -> str:
    """Return a bar of `share` of the width, to an eighth of a column.

    >>> bar(0.5, 8), bar(0.55, 8), bar(0.0, 8)
    ('████', '████▍', '')
    """
    full, eighth = divmod(round(share * width * 8), 8)
    return "█" * full + (_EIGHTHS[eighth] if eighth else "")


def signed_bar(value: float, width: int) -> str:
    """Return a bar to the left of an axis for a negative value, to the right for a positive one.

    `value` is in [-1, 1]; each side has `width` columns.

    >>> signed_bar(0.5, 4), signed_bar(-0.5, 4)
    ('    │██', '  ██│')
    """
    if value < 0:  # there are no right-aligned eighth blocks
        return right("█" * round(-value * width), width) + "│"
    return " " * width + "│" + bar(value, width)


def printable(text: str) -> str:
    """Return the text in the terminal's encoding, with ASCII bars if needed."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    return text


def width() -> int:
    """Return the terminal's width in columns; 80 if it is unknown."""
    return max(40, shutil.get_terminal_size().columns)


def echo(lines: Iterable[str] | str = "") -> None:
    """Print lines to standard output, coloured if it is a terminal and NO_COLOR is not set."""
    text = lines if isinstance(lines, str) else "\n".join(lines)
    text = _TRAILING.sub(r"\1", printable(text))
    click.echo(text, color=False if os.environ.get("NO_COLOR") else None)


cyan = partial(click.style, fg="cyan")  # bars
dim = partial(click.style, dim=True)  # headings and minor details
bold = partial(click.style, bold=True)  # what matters most


class Narration:
    """Numbered sections and notes of a demo, as lines in English or Chinese."""

    margin = "     "

    def __init__(self, *, chinese: bool) -> None:
        self.chinese = chinese

    def say(self, english: str, chinese: str) -> str:
        """Return the text in the chosen language."""
        return chinese if self.chinese else english

    def section(self, number: int, english: str, chinese: str) -> Iterator[str]:
        """Yield the lines of a heading."""
        yield ""
        yield bold(f"  {number}. {self.say(english, chinese)}")
        yield ""

    def note(self, english: str, chinese: str) -> Iterator[str]:
        """Yield the lines of a paragraph."""
        for line in self.say(english, chinese).split("\n"):
            yield (self.margin + line).rstrip()


# --- tokens ---------------------------------------------------------------------------------------

_NAMED = {" ": "␣", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}
# Character categories that a terminal hides or interprets: controls, formats (also those that
# change the direction of writing), surrogates, unassigned, separators.
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def visible_bytes(token: bytes) -> str:
    r"""Return printable text for the bytes of a token; different tokens look different.

    >>> visible_bytes(b" caf\xc3\xa9\n"), visible_bytes(b"\xe4\xbd"), visible_bytes(b"\x1b[2J")
    ('␣café\\n', '<0xE4><0xBD>', '\\x1b[2J')
    """
    shown = "".join(_character(c) for c in token.decode("utf-8", "surrogateescape"))
    # A combining character is shown on a dotted circle.
    return "◌" + shown if shown and unicodedata.category(shown[0]).startswith("M") else shown


def _character(c: str) -> str:
    if c in _NAMED:
        return _NAMED[c]
    number = ord(c)
    if 0xDC80 <= number <= 0xDCFF:  # a byte that is not part of a character
        return f"<0x{number - 0xDC00:02X}>"
    if unicodedata.category(c) in _INVISIBLE:
        return c.encode("unicode_escape").decode("ascii")
    return c


def one_line(pieces: Iterable[Piece]) -> str:
    """Return several tokens as one line of text, with newlines as \\n."""
    return visible_bytes(b"".join(piece.bytes for piece in pieces)).replace("␣", " ")


def token_label(piece: Piece) -> str:
    """Return the printable text of a token, or the name of a special token."""
    if piece.special is None:
        return visible_bytes(piece.bytes)
    return "".join(_character(c) if c != " " else c for c in piece.special)


def escape_controls(text: str) -> str:
    r"""Return the text with terminal control characters escaped.

    >>> escape_controls("one\ttwo\n\x1b[31mred")
    'one\ttwo\n\\x1b[31mred'
    """
    return "".join(_character(c) if _is_control(c) else c for c in text)


def _is_control(c: str) -> bool:
    if c in "\n\t":
        return False
    # Joiners inside emoji and Indic scripts have the category of formats too, and are safe.
    return (
        unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"}
        or "\u202a" <= c <= "\u202e"
        or ("\u2066" <= c <= "\u2069")
    )
