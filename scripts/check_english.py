"""Find expressions that readers of this field would not expect, and name the usual term.

    python scripts/check_english.py             what must pass: ENFORCED
    python scripts/check_english.py PATH...     these files and folders
    python scripts/check_english.py --all       all that people read, with a count for each file

Prints file:line: expression, and the usual term; exit code 1 if there is one. An expression that is
right where it is used gets a line in ALLOWED, or, for one line, a comment `english: NAME` on it.
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# All that people read. Paths are git's, relative to the root; a folder means all files below it.
TREE = ["src", "native", "explorer/src", "docs", "README.md", "README.zh.md", "CHANGELOG.md",
        "CONTRIBUTING.md", "benchmarks", "examples", "scripts", "Makefile"]  # fmt: skip

# What is clean, and has to stay so. Add a path when `check_english.py PATH` prints nothing.
ENFORCED = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "README.zh.md",
    "docs/api.md",
    "docs/api.zh.md",
    "docs/beam.md",
    "docs/beam.zh.md",
    "docs/certified.md",
    "docs/certified.zh.md",
    "docs/compatibility.md",
    "docs/compatibility.zh.md",
    "docs/evaluate.md",
    "docs/evaluate.zh.md",
    "docs/filter.md",
    "docs/filter.zh.md",
    "docs/first_steps.md",
    "docs/first_steps.zh.md",
    "docs/install.md",
    "docs/install.zh.md",
    "docs/lazy.md",
    "docs/lazy.zh.md",
    "docs/post_training.md",
    "docs/post_training.zh.md",
    "docs/sampling.md",
    "docs/sampling.zh.md",
    "docs/serve.md",
    "docs/serve.zh.md",
    "docs/vocab.md",
    "docs/vocab.zh.md",
    "docs/vocab_tree.md",
    "docs/vocab_tree.zh.md",
    "src/lmhead/sampling",
    "src/lmhead/screen",
    "src/lmhead/sweep",
    "src/lmhead/vocab",
]


class Rule(NamedTuple):
    """An expression to avoid, as a regular expression of whole words, and what to say instead."""

    name: str
    pattern: str
    instead: str


RULES = [
    Rule("word", r"words?", "token (a vocabulary entry)"),
    Rule("marks", r"marks", "special tokens, or what it is"),
    Rule("whole number", r"whole[- ]numbers?", "integer"),
    Rule("put out", r"put out", "dropped out, printed"),
    Rule("longest gradient", r"longest gradient", "gradient clipping"),
    Rule("sought", r"sought", "target, searched"),
    Rule("behind the prompt", r"behind the (prompt|text)", "after the prompt, generated tokens"),
    Rule("take along", r"(take|takes|taken|taking) (it )?along", "export"),
    Rule("is served", r"(is|are|was|were|be) served", "is supported, uses"),
    Rule("is told", r"(is|are|was|were|be) told", "is reported, raises an error"),
    Rule("stands", r"stands", "is, replaces"),
    Rule("so many", r"so many", "the number of"),
    Rule("nobody", r"(no|some|every)body", "no caller, another thread, all"),
    Rule("the door", r"(the|a|an|this|its|every|each|one|own) (door|room|house)s?", "what it is"),
    Rule("manners", r"manners", "behaves like"),
    Rule("a wish", r"(a|the) wish", "a request"),
    Rule("at hand", r"at hand", "available"),
    Rule("goes on with", r"(go|goes|going) on with", "continues"),
]


class Allowed(NamedTuple):
    """Where a rule does not apply: path (a pattern of fnmatch), lines that match, and why."""

    rule: str
    path: str
    line: str
    why: str


ALLOWED = [
    Allowed("word", "src/lmhead/reference/*", "", "the textbook is for learners"),
    Allowed("word", "docs/textbook*.md", "", "the textbook is for learners"),
    Allowed("word", "explorer/src/learn/*", "", "the Learn page is for learners"),
    Allowed("word", "src/lmhead/cli/_toy*.py", "", "`lmhead demo --toy` is for learners"),
    Allowed("word", "*", r"bad.words|stop words|\w-word|32-bit word", "established terms"),
    Allowed("word", "*", r"[Ff]rom a vector to a word", "how a learner would say it"),
    Allowed("word", "*", r"one token per word|33,278 words", "WikiText-2 is split into words"),
    Allowed("word", "docs/*", r"^(  (an answer|a loss|head|shortlist)|stage|Heads) ", "output"),
    Allowed("*", "scripts/check_english.py", "", "has the list"),
    Allowed("*", "src/lmhead/models/tiny/*", "", "data of a model"),
]  # fmt: skip

_MARK = re.compile(r"english: ([\w ]+)")


class Finding(NamedTuple):
    """An expression to avoid, at a line of a file."""

    path: str
    line: int
    text: str
    rule: Rule

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}; say {self.rule.instead}"


def allowed(rule: Rule, path: str, line: str) -> bool:
    """Return whether an entry of ALLOWED, or a comment on the line, allows the expression."""
    mark = _MARK.search(line)
    if mark and mark[1].startswith(rule.name):
        return True
    return any(
        entry.rule in (rule.name, "*")
        and fnmatch.fnmatch(path, entry.path)
        and re.search(entry.line, line)
        for entry in ALLOWED
    )


def check(path: str, text: str) -> Iterator[Finding]:
    """Yield what a file with this text should say otherwise."""
    for number, line in enumerate(text.splitlines(), 1):
        for rule in RULES:
            for found in re.finditer(rf"\b({rule.pattern})\b", line, re.IGNORECASE):
                if not allowed(rule, path, line):
                    yield Finding(path, number, found[0], rule)


def files(paths: list[str]) -> list[str]:
    """Return the files under git, new ones included, at or below these paths."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *paths],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return sorted({name for name in listed.stdout.split("\0") if (ROOT / name).is_file()})


def main(arguments: list[str] | None = None) -> int:
    """Check files, print what is found, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="files and folders [default: what must pass]")
    parser.add_argument("--all", action="store_true", help="all that people read, with counts")
    given = parser.parse_args(arguments)
    count: Counter[str] = Counter()
    for name in files(TREE if given.all else given.paths or ENFORCED):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        for finding in check(name, text):
            print(finding)
            count[name] += 1
    if given.all:
        for name, number in count.most_common():
            print(f"{number:5} {name}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
