"""The guided tour in two languages: the same examples with the same results."""

import doctest
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _examples(page: str) -> list[tuple[str, str]]:
    """Code and result of each example, without comments and without the words of the language."""
    text = (DOCS / page).read_text(encoding="utf-8")
    examples = []
    for example in doctest.DocTestParser().get_examples(text):
        source = re.sub(r"  # .*", "", example.source)
        source, want = (re.sub(r"""(["'])\w+\1""", "word", part) for part in (source, example.want))
        examples.append((source, want))
    return examples


def test_both_pages_show_the_same() -> None:
    english, chinese = _examples("textbook.md"), _examples("textbook.zh.md")
    assert len(english) > 50
    assert english == chinese


def test_both_pages_have_the_same_sections_and_point_at_each_other() -> None:
    english, chinese = (
        (DOCS / page).read_text(encoding="utf-8") for page in ("textbook.md", "textbook.zh.md")
    )
    levels = [re.findall(r"^#+ ?\d?", text, flags=re.MULTILINE) for text in (english, chinese)]
    assert levels[0] == levels[1]
    assert "(textbook.zh.md)" in english
    assert "(textbook.md)" in chinese
