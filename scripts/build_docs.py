"""Build the documentation site: `make docs`.

    python scripts/build_docs.py                 build/site, then run the examples of all pages
    python scripts/build_docs.py --no-examples   the site alone (`make test` runs the examples, too)
    python scripts/build_docs.py --serve         show it while writing

A public name without a docstring, a broken link, a warning and an example that fails are errors.

The pages are written for GitHub, where links lead to files of the repository. This script collects
them in build/docs with the links that the site has: README becomes the first page, a page's Chinese
version is chosen by the language switch, and figures come from benchmarks/results.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import docs_lazy_operations

import lmhead

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
RESULTS = ROOT / "benchmarks" / "results"

# Files outside docs/, and the page that each becomes.
PAGES = {
    "README.md": "index.md",
    "README.zh.md": "index.zh.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "measuring.md",
}


def site_page(text: str, chinese: bool) -> str:
    """Return a page with the links of the site, in the Markdown that MkDocs reads."""
    # Another language is one click away on every page.
    other = r"\[(?:English|中文)[^\]]*\]\((?:docs/)?[\w/]+(?:\.zh)?\.md\)"
    text = re.sub(rf"^\*?{other}\*?\n+", "", text, flags=re.MULTILINE)
    text = re.sub(rf" ?[(（]{other}[)）]", "", text)
    text = re.sub(r"\]\((?:\.\./)?benchmarks/results(?:/[\w-]+)?/?\)", "](benchmarks.md)", text)
    text = re.sub(r"\]\((?:\.\./)?benchmarks/results/", "](results/", text)
    for name, page in PAGES.items():
        text = re.sub(rf"\]\((?:\.\./)?{re.escape(name)}", f"]({page}", text)
    text = re.sub(r"\]\((?:\.\./)?examples/", "](examples/", text)
    text = re.sub(r"\]\(docs/", "](", text)
    if chinese:
        text = re.sub(r"(\]\([\w/]+)\.zh\.md", r"\1.md", text)
    # A block with prompts has a highlighter of its own.
    text = text.replace("```python\n>>>", "```pycon\n>>>")
    # GitHub begins a list without a blank line before it.
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    item = re.compile(r"^(?!(?:[-*]|\d+\.) )(\S.*)\n(?=(?:[-*]|\d+\.) )", re.MULTILINE)
    parts[::2] = [item.sub(r"\1\n\n", part) for part in parts[::2]]
    return "".join(parts)


HELP_PAGES = "<!-- help pages: scripts/build_docs.py puts those of commands.md here -->\n"


def with_help_pages(introduction: str, commands: str) -> str:
    """Return the Chinese page of commands: its introduction, and the help pages as printed."""
    if HELP_PAGES not in introduction:
        raise ValueError(f"commands.zh.md must have the line {HELP_PAGES.strip()}")
    # The links to the English page stay in the repository.
    introduction = re.sub(r"；在仓库中见 \[.*?\]\(commands\.md\)", "", introduction)
    return introduction.replace(HELP_PAGES, commands[commands.index("## lmhead") :])


def figures(chinese: bool) -> str:
    """Return the page of benchmark figures, each with its conditions."""
    lines = ["# 基准测试" if chinese else "# Benchmarks", ""]
    for path in sorted(RESULTS.rglob("*.json")):
        if not path.with_suffix(".svg").exists():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        machine, versions = result.get("machine", {}), result.get("versions", {})
        conditions = [
            machine.get("processor"),
            f"{result.get('threads', machine.get('cores', '?'))} threads",
            *(f"{name} {versions[name]}" for name in ("lmhead", "torch") if name in versions),
            result.get("commit") and f"commit {result['commit']}",
            result.get("date", "")[:10],
        ]
        title = result.get("title") or path.stem
        name = path.relative_to(RESULTS).with_suffix("").as_posix()
        lines += [
            f"## {title[0].upper()}{title[1:]}",
            "",
            f"{', '.join(filter(None, conditions))}. [{name}.json](results/{name}.json)",
            "",
            f"![{title}](results/{name}.svg)",
            "",
        ]
    return "\n".join(lines)


def collect() -> None:
    """Fill build/docs."""
    shutil.rmtree(OUT, ignore_errors=True)
    shutil.copytree(ROOT / "docs", OUT)
    shutil.copytree(RESULTS, OUT / "results")
    shutil.copytree(
        ROOT / "examples", OUT / "examples", ignore=shutil.ignore_patterns("__pycache__", "eval")
    )
    for name, page in PAGES.items():
        shutil.copy(ROOT / name, OUT / page)
    introduction, commands = (OUT / name for name in ("commands.zh.md", "commands.md"))
    introduction.write_text(
        with_help_pages(introduction.read_text("utf-8"), commands.read_text("utf-8")), "utf-8"
    )
    for page in OUT.glob("*.md"):
        chinese = page.name.endswith(".zh.md")
        page.write_text(site_page(page.read_text("utf-8"), chinese), encoding="utf-8")
    (OUT / "what_streams.md").write_text(docs_lazy_operations.page("en"), encoding="utf-8")
    (OUT / "what_streams.zh.md").write_text(docs_lazy_operations.page("zh"), encoding="utf-8")
    (OUT / "benchmarks.md").write_text(figures(chinese=False), encoding="utf-8")
    (OUT / "benchmarks.zh.md").write_text(figures(chinese=True), encoding="utf-8")


def finish_search() -> None:
    """Rewrite the search index: a page without Chinese version is found once, not twice.

    The copy for a site without a server was made before the index of both languages was complete.
    """
    folder = SITE / "search"
    index = json.loads((folder / "search_index.json").read_text(encoding="utf-8"))
    chinese = {f"zh/{path.name[:-6]}.html" for path in OUT.glob("*.zh.md")}
    index["docs"] = [
        entry
        for entry in index["docs"]
        if not entry["location"].startswith("zh/") or entry["location"].split("#")[0] in chinese
    ]
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    (folder / "search_index.json").write_text(text, encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {text}", encoding="utf-8")


def missing_docstrings(package: Any) -> list[str]:
    """Return the public names, and their methods and properties, that have no docstring."""
    missing = []
    for name in package.__all__:
        thing = getattr(package, name)
        if not name.startswith("_") and not getattr(thing, "__doc__", None):
            missing.append(name)
        if isinstance(thing, type):
            own = [n for n, value in vars(thing).items() if inspect.isroutine(value)]
            own += [n for n, value in vars(thing).items() if isinstance(value, property)]
            missing += [
                f"{name}.{member}"
                for member in own
                if not member.startswith("_") and not inspect.getdoc(getattr(thing, member))
            ]
    return missing


def main() -> int:
    """Check docstrings, collect the pages, run MkDocs and the examples."""
    if missing := missing_docstrings(lmhead):
        print(f"no docstring: {', '.join(missing)}", file=sys.stderr)
        return 1
    collect()
    os.environ["NO_MKDOCS_2_WARNING"] = "1"
    command = ["serve"] if "--serve" in sys.argv[1:] else ["build", "--strict", "--clean"]
    done = subprocess.run([sys.executable, "-m", "mkdocs", *command, "-f", ROOT / "mkdocs.yml"])
    if done.returncode:
        return done.returncode
    finish_search()
    if "--no-examples" in sys.argv[1:] or "--serve" in sys.argv[1:]:
        return 0
    pages = ["README.md", "README.zh.md", "docs"]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *pages], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
