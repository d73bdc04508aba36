"""What `make docs` builds: links of the site, the API page, two languages of equal structure."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lmhead

ROOT = Path(__file__).resolve().parents[1]

# Pages without a Chinese version: the site shows the English one. The list only gets shorter.
UNTRANSLATED = {
    "CHANGELOG.md", "CONTRIBUTING.md", "docs/commands.md",
    "docs/generate.md", "docs/json.md", "docs/models.md",
    "docs/training.md", "docs/transformer.md",
}  # fmt: skip
PAGES = [
    *ROOT.glob("docs/*.md"),
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
]
ENGLISH = sorted(page for page in PAGES if not page.name.endswith(".zh.md"))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("github", "site"),
    [
        ("[lazy](docs/lazy.md#exact)", "[lazy](lazy.md#exact)"),
        ("[log](CHANGELOG.md)", "[log](changelog.md)"),
        ("[more](../CONTRIBUTING.md)", "[more](contributing.md)"),
        ("![x](../benchmarks/results/x.png)", "![x](results/x.png)"),
        ("in [`results`](benchmarks/results)", "in [`results`](benchmarks.md)"),
        ("[中文说明](README.zh.md)\n\nText", "Text"),
        ("*[中文版](textbook.zh.md)*\n\nText", "Text"),
        ("the tour ([中文](docs/textbook.zh.md)).", "the tour."),
        ("Text:\n- one\n  more\n- two", "Text:\n\n- one\n  more\n- two"),
        ("```python\n>>> 1\n- x\n```", "```pycon\n>>> 1\n- x\n```"),
        ("```python\nx = 1\n- x\n```", "```python\nx = 1\n- x\n```"),
    ],
)  # fmt: skip
def test_page_of_the_site(github: str, site: str) -> None:
    assert script("build_docs").site_page(github, chinese=False) == site


def test_link_of_a_chinese_page() -> None:
    page = script("build_docs").site_page("[词表](vocab.zh.md#a)", chinese=True)
    assert page == "[词表](vocab.md#a)"


def test_docstring_as_markdown() -> None:
    text = "Sum.\n\nEquivalent to: a[i] +\nb[i]\n\n>>> f(1)\n[2]\n\nMore.\n"
    assert script("docs_docstrings").as_markdown(text) == (
        "Sum.\n\nEquivalent to:\n\n```text\na[i] +\nb[i]\n```\n\n"
        "```pycon\n>>> f(1)\n[2]\n```\n\nMore.\n"
    )


@pytest.mark.parametrize("page", ["api.md", "api.zh.md"])
def test_api_page_has_every_public_name(page: str) -> None:
    named = re.findall(
        r"^::: lmhead\.(\w+)$", (ROOT / "docs" / page).read_text("utf-8"), re.MULTILINE
    )
    assert sorted(named) == sorted(set(lmhead.__all__) - {"__version__"})
    for name in named:
        assert getattr(lmhead, name).__doc__, f"lmhead.{name} has no docstring"


def test_every_page_is_in_chinese_or_on_the_list() -> None:
    missing = {
        str(page.relative_to(ROOT)) for page in ENGLISH if not page.with_suffix(".zh.md").exists()
    }
    assert missing == UNTRANSLATED


@pytest.mark.parametrize(
    "page",
    [page for page in ENGLISH if page.with_suffix(".zh.md").exists()],
    ids=lambda page: page.name,
)
def test_both_languages_have_the_same_structure(page: Path) -> None:
    def structure(path: Path) -> list[str]:
        return re.findall(r"^(#+|```\w*|:::.*)(?= |$)", path.read_text("utf-8"), re.MULTILINE)

    assert structure(page) == structure(page.with_suffix(".zh.md"))
