"""Find expressions that readers of this field would not expect, and name the usual term.

    python scripts/check_english.py             all that people read: TREE
    python scripts/check_english.py PATH...     these files and folders
    python scripts/check_english.py --count     the number for each file, most first

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
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# All that people read. Paths are git's, relative to the root; a folder means all files below it.
TREE = ["src", "native", "explorer/src", "docs", "README.md", "README.zh.md", "CHANGELOG.md",
        "CONTRIBUTING.md", "SECURITY.md", "benchmarks", "examples", "scripts", "Makefile",
        "mkdocs.yml", "tests", "explorer/tests"]  # fmt: skip


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
    Rule("came of", r"what (came|comes|became|becomes) of", "the result, the outcome"),
    Rule("makes of", r"(make|makes|made) of (it|them|this)", "the result"),
    Rule("be had", r"(can|cannot|could|could not) be had", "is supported, is available"),
    Rule("in force", r"in force", "active"),
    Rule("gives back", r"(give|gives|gave|given) back", "returns"),
    Rule("in the manner of", r"in the manner of", "like"),
    Rule("put an end to", r"puts? an end to", "ends, removes"),
    Rule("said", r"said|heard|obeyed|untold", "output, message, context: what it is"),
]


class Allowed(NamedTuple):
    """Where a rule does not apply: path (a pattern of fnmatch), lines that match, and why.

    The path of a line in a JSON file ends with #KEY, its key at the top level.
    """

    rule: str
    path: str
    line: str
    why: str


ALLOWED = [
    Allowed("word", "src/lmhead/reference/*", "", "the textbook is for learners"),
    Allowed("word", "docs/textbook*.md", "", "the textbook is for learners"),
    Allowed("word", "examples/learn.ipynb", "", "the notebook is for learners"),
    Allowed("word", "explorer/src/learn/*", "", "the Learn page is for learners"),
    *(Allowed("word", f"explorer/src/i18n/*.json#{key}", "", "texts of the Learn page")
      for key in ("words", "intro", "hidden", "linear", "logits", "stable", "temperature", "chain",
                  "draw", "loss", "tree", "norms", "bias", "initial", "attention", "backward",
                  "jacobian", "whylogits", "translation")),
    Allowed("word", "explorer/src/i18n/*.json#common", '"word":', "heads of its tables"),
    Allowed("word", "explorer/src/next/nextExport.ts", "words: ", "JSON fields of schema 1"),
    Allowed("word", "docs/explorer*.md", "Learn's has|“学习”页的有", "JSON of the Learn page"),
    Allowed("word", "docs/commands.md", "--toy|word step by step|separated by", "help of commands"),
    Allowed("word", "src/lmhead/cli/_toy*.py", "", "`lmhead demo --toy` is for learners"),
    Allowed("word", "*", r"[Bb]ad.?[Ww]ords|stop words|\w-word|32-bit word", "established terms"),
    Allowed("word", "*", r"tie_word_embeddings|Word(Piece|Level)|word.piece", "Hugging Face"),
    Allowed("word", "*", r"[Ww]ord.?[Pp]erplexity|per word", "what lm-evaluation-harness reports"),
    Allowed("word", "*", r"word-break|break-word", "properties of CSS"),
    Allowed("take along", "*", r"take_along_(dim|axis)", "names of torch and NumPy"),
    Allowed("word", "src/lmhead/analysis/score.py", "", "counts words separated by white space"),
    Allowed("word", "src/lmhead/cli/cmd_score.py", "separated", "the same"),
    Allowed("word", "src/lmhead/cli/_score_views.py", "definition of", "the same"),
    Allowed("word", "src/lmhead/*", r"[Tt]oy\b", "`lmhead demo --toy` is for learners"),
    Allowed("word", "src/lmhead/train/vocabulary.py", "", "makes a vocabulary of words"),
    Allowed("word", "*", r"--tokenizer|bpe\b|BPE|frequent words|rare words", "that vocabulary"),
    Allowed("word", "src/lmhead/models/*tokenizer.py", "", "tokenizers split words"),
    Allowed("word", "*", r"Chinese does not separate words|splits words|within a word", "language"),
    Allowed("word", "*", r"a word, a part of one", "the definition of a token"),
    Allowed("word", "*", r"\bword_at\b", "a buffer that is saved in checkpoints"),
    Allowed("word", "docs/json*.md", r"^\| `(words|processed)` ", "JSON fields of schema 1"),
    Allowed("word", "*", r"[Ff]rom a vector to a word", "how a learner would say it"),
    Allowed("word", "*", r"one token per word|33,278 words", "WikiText-2 is split into words"),
    Allowed("word", "docs/*", r"^(  (an answer|a loss|head|shortlist)|stage|Heads) ", "output"),
    Allowed("*", "scripts/check_english.py", "", "has the list"),
    Allowed("*", "tests/test_check_english.py", "", "has examples"),
    Allowed("word", "tests/*", "", "sample texts consist of words"),
    Allowed("word", "explorer/tests/*", "", "sample texts consist of words"),
    Allowed("*", "explorer/tests/*.json", "", "data of tests"),
    Allowed("*", "benchmarks/results/*.json", "", "measurements"),
    Allowed("marks", "tests/*", "marks=", "an argument of pytest.param"),
    Allowed("said", "*.md", "", "prose"),
    Allowed("said", "src/lmhead/reference/*", "", "the textbook is for learners"),
    Allowed("said", "tests/*", "Lily said", "a sample text"),
    Allowed("said", "explorer/*", "", "names in the page"),
    Allowed("said", "tests/explorer/*", "", "names in tests of the page"),
    Allowed("said", "examples/eval/*", "", "a sample text"),
    Allowed("*", "src/lmhead/models/tiny/*", "", "data of a model"),
]  # fmt: skip

_MARK = re.compile(r"english: ([\w ]+)")
_IN_NAMES = re.compile(r"_|(?<=[a-z])(?=[A-Z])")  # between the parts of snake_case and camelCase


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


def _rules(path: str, rules: list[Rule]) -> list[Rule]:
    """Return those of the rules that are not allowed for every line of the file."""
    return [rule for rule in rules if not allowed(rule, path, "")]


@cache
def _pattern(rule: Rule) -> re.Pattern[str]:
    return re.compile(rf"\b({rule.pattern})\b", re.IGNORECASE)


def check(path: str, text: str) -> Iterator[Finding]:
    """Yield the expressions to avoid in a file with this text."""
    # Most rules in most files match nothing; a search for lower-case text without \b is fast.
    separated = _IN_NAMES.sub(" ", text).lower()
    occurring = [rule for rule in RULES if re.search(rule.pattern, separated)]
    location, rules = path, _rules(path, occurring)
    for number, line in enumerate(text.splitlines(), 1):
        if path.endswith(".json") and (section := re.match(r'  "(\w+)":', line)):
            location = f"{path}#{section[1]}"
            rules = _rules(location, occurring)
        separated = _IN_NAMES.sub(" ", line)
        for rule in rules:
            for match in _pattern(rule).finditer(separated):
                if not allowed(rule, location, line):
                    yield Finding(path, number, match[0], rule)


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
    parser.add_argument("paths", nargs="*", help="files and folders [default: TREE]")
    parser.add_argument("--count", action="store_true", help="count the findings of each file")
    options = parser.parse_args(arguments)
    count: Counter[str] = Counter()
    for name in files(options.paths or TREE):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        for finding in check(name, text):
            count[name] += 1
            if not options.count:
                print(finding)
    if options.count:
        for name, number in count.most_common():
            print(f"{number:5} {name}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
