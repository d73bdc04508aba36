"""`lmhead translate`: arguments, lines in and out, JSON, BLEU, and what cannot be opened."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lmhead.cli import main
from lmhead.train import TrainConfig, train

NUMBERS = [(str(n), "".join("零一二三四五六七八九"[int(d)] for d in str(n))) for n in range(10, 90)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("translate")
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"{a}\t{b}\n" for a, b in NUMBERS), encoding="utf-8")
    config = TrainConfig(
        task="translate",
        corpus=(str(pairs),),
        vocab_size=280,
        held_out=6,
        layers=1,
        heads=2,
        width=32,
        block=12,
        position="sinusoidal",
        batch_tokens=200,
        steps=120,
        warmup=5,
        learning_rate=0.01,
        eval_every=120,
        save_every=120,
        curve=False,
        threads=1,
    )
    train(config, folder / "run")
    return folder / "run"


def call(*arguments: Any, input: str | None = None) -> Result:
    return CliRunner().invoke(main, ["translate", *map(str, arguments)], input=input)


def test_a_sentence_of_the_command(run: Path) -> None:
    found = call(run, "42", "17")
    assert found.exit_code == 0, found.output
    assert found.stdout == "四二\n一七\n"


def test_one_output_line_per_input_line(run: Path) -> None:
    found = call(run, input="42\n\n17\n")
    assert found.stdout == "四二\n\n一七\n"
    assert call(run, "-", input="42\r\n").stdout == "四二\n"
    assert call(run, input="").stdout == ""


def test_standard_input_must_be_text(run: Path) -> None:
    found = CliRunner().invoke(main, ["translate", str(run)], input=b"42\ncaf\xe9\n")
    assert found.exit_code == 3
    assert "line 2 is not" in found.output


def test_several_translations_of_one(run: Path) -> None:
    lines = call(run, "42", "--n-best", 3, "--beams", 5).stdout.splitlines()
    scores = [float(line.split()[0]) for line in lines]
    assert len(lines) == 3
    assert scores == sorted(scores, reverse=True)
    assert lines[0].endswith("  四二")


def test_json(run: Path) -> None:
    document = json.loads(call(run, "42", "", "--json", "--n-best", 2).stdout)
    assert document["command"] == "translate"
    assert document["schema"] == 1
    first, empty = document["translations"]
    assert (first["source"], first["best"][0]["text"]) == ("42", "四二")
    assert len(first["best"]) == 2
    assert first["best"][0]["score"] <= 0
    assert empty == {"source": "", "best": []}


def test_bleu_of_a_file(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu", reason="sacreBLEU is not installed")
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("42\t四二\n17\t一八\n", encoding="utf-8")
    found = call(run, "--bleu", pairs, "--samples", 1)
    assert found.exit_code == 0, found.output
    assert found.stdout.startswith("42\n  四二\n  四二\nBLEU ")
    assert "17" not in found.stdout
    assert "tok:zh" in found.stdout
    document = json.loads(call(run, "--bleu", pairs, "--json").stdout)
    assert document["pairs"] == len(document["samples"]) == 2
    assert document["samples"][1]["reference"] == "一八"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--n-best", "5"], "--n-best must be at most --beams, 4; got 5"),
        (["x", "--bleu", "pairs.tsv"], "--bleu reads the sentences from its file"),
        (["x", "--beams", "0"], "0 is not in the range"),
    ],
)
def test_mistakes_in_the_command(run: Path, arguments: list[str], message: str) -> None:
    found = call(run, *arguments)
    assert found.exit_code == 2
    assert message in found.output


def test_what_cannot_be_opened(run: Path, tmp_path: Path) -> None:
    found = call(tmp_path / "missing", "x")
    assert found.exit_code == 3
    assert "missing" in found.output
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(run / "checkpoints" / "step-00000120", checkpoint)
    assert call(checkpoint, "42").stdout == "四二\n"
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    found = call(checkpoint, "42")
    assert (found.exit_code, "model.safetensors" in found.output) == (3, True)
    about = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**about, "kind": "decoder"}))
    found = call(checkpoint, "42")
    assert found.exit_code == 3
    assert "kind must be 'encoder-decoder'" in found.output
    assert "Traceback" not in found.output
    found = call(run, "--bleu", tmp_path / "no.tsv")
    assert (found.exit_code, "cannot read" in found.output) == (3, True)
    (tmp_path / "empty.tsv").write_text("")
    assert call(run, "--bleu", tmp_path / "empty.tsv").exit_code == 3
