"""docs/json.md: every field of every document is on the page, and none that no document has."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click import Context
from click.testing import CliRunner
from tiny_models import write_model

from lmhead.cli import main
from lmhead.models import bundled

PAGE = (Path(__file__).resolve().parents[2] / "docs/json.md").read_text(encoding="utf-8")
COMMON, *SECTIONS = PAGE.split("\n## ")
SECTION = {section.split("\n", 1)[0]: section for section in SECTIONS}
TINY = "--layers 1 --heads 1 --width 8 --block 8 --batch 2 --steps 2 --eval-every 0"
TRAIN = f"--tokenizer characters {TINY}"
TRANSLATE = f"--task translate --vocab-size 270 --held-out 2 {TINY}"

# The calls whose documents, together, have all the fields of a command.
CALLS: dict[str, list[str]] = {
    "next": ["next {model} hello", "next {model} hello --top-p 0.9"],
    "score": ["score {model} {text}", "score {model} --text hello"],
    "generate": [
        "generate {model} hello -n 3 --logprobs 2",
        "generate {model} hello -n 3 --screen --seed 1",
        "generate {model} hello -n 3 --beams 2",
    ],
    "eval": ["eval {model} --tasks {tasks} --limit 2"],
    "lens": ["lens {model} hello"],
    "distill-cache": ["distill-cache {model} {text} --out {cache} --bits 8"],
    "compare": [
        "compare {model} {other} {text}",
        "compare {model} {text} --sampler-a top_k=2",
    ],
    "train": ["train {text} --out {new} " + TRAIN],
    "translate": ["translate {run} a b --n-best 2", "translate {run} --bleu {pairs}"],
    "inspect": ["inspect {model}"],
    "check": ["check {model} --tokens 4"],
    "models": ["models list", "models path tiny"],
    "cache": ["cache list", "cache clear"],
    "doctor": ["doctor"],
}
# The text of a token, of settings or of a file is no field.
FREE = {"settings"}
MODEL = {"name", "vocab_size", "hidden_size", "max_length"}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache/screen").mkdir(parents=True)
    (tmp_path / "cache/screen/copy.safetensors").touch()


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("json")
    (folder / "text.txt").write_text("hello ab 你 cab hello\n" * 20, encoding="utf-8")
    pairs = "".join(f"{a}\t{a}{b}\n" for a in "abcdef" for b in "xyz")
    (folder / "pairs.tsv").write_text(pairs, encoding="utf-8")
    places = {
        "model": str(write_model(folder / "model")),
        "other": str(write_model(folder / "other", seed=1)),
        "text": str(folder / "text.txt"),
        "cache": str(folder / "teacher"),
        "pairs": str(folder / "pairs.tsv"),
        "run": str(folder / "run"),
        "tasks": str(Path(__file__).resolve().parents[2] / "examples/eval/choice.yaml"),
        "new": str(folder / "new"),
    }
    call("train {pairs} --out {run} " + TRANSLATE, places)
    return places


def call(line: str, places: dict[str, str]) -> dict[str, Any]:
    arguments = [part.format(**places) for part in line.split()]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def tabled(text: str) -> set[str]:
    """The fields in the first column of tables."""
    rows = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def inner(value: Any) -> Iterator[str]:
    """The names of all fields inside a value."""
    if isinstance(value, list):
        for entry in value:
            yield from inner(entry)
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield name
            if name not in FREE:
                yield from inner(entry)


@pytest.mark.parametrize("name", CALLS)
def test_the_page_and_the_documents_have_the_same_fields(name: str, places: dict[str, str]) -> None:
    if any("--bleu" in line for line in CALLS[name]):
        pytest.importorskip("sacrebleu", reason="sacreBLEU is not installed")
    if name == "models" and bundled.find("tiny") is None:
        pytest.skip("tiny is not part of this installation")
    documents = [call(line, places) for line in CALLS[name]]
    fields = {field for document in documents for field in document}
    own = tabled(SECTION[name])
    replaced = set(re.findall(r"`(\w+)`", re.sub(r"^\|.*$", "", SECTION[name], flags=re.M)))
    assert fields - own - replaced <= tabled(COMMON)
    native = next((d["core"] for d in documents if "core" in d), "native") == "native"
    if name != "doctor" or native:
        assert own <= fields
    for document in documents:
        assert (document["command"], document["schema"]) == (name, 1)
        if "model" in document:
            assert set(document["model"]) - {"engine"} == MODEL
    documented = set(re.findall(r"`(\w+)`", SECTION[name] + SECTION["A token"] + COMMON))
    assert {field for document in documents for field in inner(document)} <= documented


def test_every_command_with_json_has_a_section() -> None:
    with_json, context = set(), Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        inside = getattr(command, "commands", {None: command}).values()
        if any(p.name == "as_json" for one in inside for p in one.params):
            with_json.add(name)
    assert with_json - {"bench"} == set(CALLS) == set(SECTION) - {"A token"}
