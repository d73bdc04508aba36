"""What the two demos are told in: numbered sections and notes, in English or Chinese."""

from collections.abc import Iterator

import click

MARGIN = "     "


class Telling:
    """Sections as lines, in one language."""

    def __init__(self, *, chinese: bool) -> None:
        self.chinese = chinese

    def say(self, english: str, chinese: str) -> str:
        """In the language."""
        return chinese if self.chinese else english

    def section(self, number: int, english: str, chinese: str) -> Iterator[str]:
        """A heading."""
        yield ""
        yield click.style(f"  {number}. {self.say(english, chinese)}", bold=True)
        yield ""

    def note(self, english: str, chinese: str) -> Iterator[str]:
        """One or more lines of plain words under a section."""
        for line in self.say(english, chinese).split("\n"):
            yield (MARGIN + line).rstrip()
