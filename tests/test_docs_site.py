"""What `make docs` builds: links of the site, the API page, two languages of equal structure."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import click
import pytest
import torch

import lmhead
from lmhead.cli import main
from lmhead.server import create_api_app, create_app

ROOT = Path(__file__).resolve().parents[1]

# Pages without a Chinese version: the site shows the English one. The list only gets shorter.
UNTRANSLATED = {"CHANGELOG.md", "CONTRIBUTING.md"}
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
    def structure(text: str) -> list[str]:
        return re.findall(r"^(#+|```\w*|:::.*)(?= |$)", text, re.MULTILINE)

    english, chinese = (p.read_text("utf-8") for p in (page, page.with_suffix(".zh.md")))
    if page.name == "commands.md":
        chinese = script("build_docs").with_help_pages(chinese, english)
    assert structure(english) == structure(chinese)


def test_no_chinese_page_without_an_english_one() -> None:
    chinese = [page for page in PAGES if page.name.endswith(".zh.md")]
    assert chinese
    for page in chinese:
        assert page.with_name(page.name.replace(".zh.md", ".md")).exists(), page


def test_chinese_page_lists_every_command() -> None:
    text = (ROOT / "docs" / "commands.zh.md").read_text("utf-8")
    assert re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE) == main.list_commands(
        click.Context(main)
    )


def test_page_of_lazy_operations_is_read_from_the_code() -> None:
    groups = script("docs_lazy_operations").groups()
    for group, some in {
        "pointwise": ["+", "exp", "masked_fill", "where", "mask_tokens"],
        "rows": ["view", "cat", "hstack", "softmax", "[...]", "float", "type"],
        "reductions": ["topk", "logsumexp", "special.logsumexp", "gather", "equal", "median"],
        "losses": ["cross_entropy", "kl_div", "mse_loss"],
        "written": ["copy_", "scatter", "[...] ="],
        "other": ["zeros_like"],
        "builds": ["sort", "cumsum", "matmul"],
    }.items():
        assert set(some) <= set(groups[group])
    logits = lmhead.LMHead(4, 9)(torch.zeros(2, 4))
    with pytest.warns(lmhead.PerformanceWarning, match="sort"):
        logits.sort(-1)


def test_http_page_has_every_route(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    apps = (
        create_api_app({}, hosts=["here"]),
        create_app({}, hosts=["here"], page=tmp_path),
    )
    routes = {
        re.sub(r"\{(\w+):path\}", lambda m: m[1].upper(), route.path): sorted(
            route.methods - {"HEAD"}
        )
        for app in apps
        for route in app.app.routes  # type: ignore[attr-defined]
        if not route.path.startswith("/{")
    }
    for page in ("http.md", "http.zh.md"):
        text = (ROOT / "docs" / page).read_text("utf-8")
        listed = re.findall(r"^\| `(GET|POST) (/[^`]+)` \|", text, re.MULTILINE)
        assert {path: [method] for method, path in listed} == routes


GUIDES = [
    page
    for entry in re.findall(
        r"  - Guides:\n((?:      - .+\n)+)", (ROOT / "mkdocs.yml").read_text("utf-8")
    )
    for page in re.findall(r": (\w+\.md)$", entry, re.MULTILINE)
]


@pytest.mark.parametrize("name", GUIDES)
def test_guide_starts_with_a_program_and_ends_with_what_may_go_wrong(name: str) -> None:
    for page, heading in ((name, "When it goes wrong"), (name.replace(".md", ".zh.md"), "出错时")):
        text = (ROOT / "docs" / page).read_text("utf-8")
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings[-1] == heading
        assert text.index("```") < 2500, "a program comes first"


def test_order_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    assert re.findall(r"^  - ([^:\n]+):", nav, re.MULTILINE)[:11] == [
        "What it is", "Install", "First ten minutes", "Guides", "Concepts", "Textbook", "Reference",
        "Benchmarks", "Compatibility", "Glossary", "Contributing",
    ]  # fmt: skip


def test_missing_docstrings_are_found() -> None:
    class Named:
        """Documented."""

        @property
        def undocumented_property(self) -> int:
            return 1

        def documented(self) -> None:
            """Return nothing."""

        def undocumented(self) -> None:
            pass

        def _private(self) -> None:
            pass

    found = script("build_docs").missing_docstrings
    package = SimpleNamespace(__all__=["Named", "bare", "__version__"], Named=Named)
    package.bare, package.__version__ = lambda: None, ""
    assert found(package) == ["Named.undocumented", "Named.undocumented_property", "bare"]
    assert found(lmhead) == []
