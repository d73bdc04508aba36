"""Benchmarks of heads for huge vocabularies at tiny size: they run, resume, check results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.running import document_of, run
from benchmarks import goals, vocab_scaling, vocab_training
from benchmarks.vocab_heads import HEADS, QUESTIONS, Output, check, peer


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Write texts of 80 tokens, the first the most frequent; one is only in valid.txt."""
    torch.manual_seed(0)
    ids = (1 / torch.arange(1, 81)).multinomial(2000, replacement=True).view(50, 40)
    lines = [" ".join(f"w{i}" for i in row) for row in ids.tolist()]
    (tmp_path / "train.txt").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "valid.txt").write_text("new " + "\n".join(lines[:5]), encoding="utf-8")
    return tmp_path


TINY = "--batch 4 --window 8 --width 32 --layers 1 --steps 4 --every 2 --samples 5"
TINY += " --valid-tokens 40 --timing-seconds 0"


def test_training_of_all_heads_is_resumed(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = {"first": 3 * 2**20, "later": 2 * 2**20, "results": 2**20, "temporary": 2**20}
    monkeypatch.setattr(vocab_training, "memory", lambda *_: grown)
    given = ["vocab-training", "--data", texts, "--work", texts / "work", *TINY.split()]
    first = document_of(*given, "--head", "full", "--head", "adaptive", out=texts)
    assert [r["kind"] for r in first["results"]] == ["full", "adaptive"]

    done = run(*given, "--out", texts)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("was trained before") == 2
    document = json.loads((texts / "vocab-training.json").read_text(encoding="utf-8"))
    assert [r["kind"] for r in document["results"]] == list(HEADS)
    assert document["results"][0]["curve"] == first["results"][0]["curve"]
    for result in document["results"]:
        assert [point["step"] for point in result["curve"]] == [2, 4]
        # All start from the token frequencies, so none is far from the others.
        assert 20 < result["perplexity"] < 120
        assert set(result["timing"]) == set(QUESTIONS)
        assert len(result["timing"]["argmax"]["seconds"]) == 3
    assert document["results"][0]["timing"]["argmax"]["faster"] == 1
    assert "torch full" in [p["name"] for p in document["peers"]]
    assert "adaptive head, perplexity / full" in done.stdout
    assert {p.suffix for p in texts.glob("vocab-training.*")} == {".json", ".png", ".svg"}

    other = run(*given, "--out", texts, "--head", "full", "--seed", 1)
    assert "was trained before" not in other.output


def test_the_heads_of_torch_have_the_weights_of_ours() -> None:
    frequencies = 1 / torch.arange(1, 5001)
    hidden, targets = torch.randn(6, 32), torch.randint(5000, (6,))
    for kind in ("full", "adaptive"):
        output = Output(kind, 32, frequencies, samples=5)
        calls = peer(output, hidden, targets)
        assert calls is not None
        with torch.no_grad():
            expected = output.head(hidden[:1]).argmax(-1)
        assert torch.equal(torch.as_tensor(calls["argmax"]()), expected)
    assert peer(Output("hierarchical", 32, frequencies, samples=5), hidden, targets) is None


def test_memory_in_a_fresh_process(tmp_path: Path) -> None:
    frequencies = torch.ones(3000)
    output = Output("full", 16, frequencies, samples=5)
    file = tmp_path / "full.pt"
    made = {"head": output.state_dict(), "hidden": torch.randn(8, 16), "frequencies": frequencies}
    made |= {"settings": {"samples": 5}, "targets": torch.arange(8)}
    vocab_training.save(made, file)
    grown = vocab_training.memory("full", file)
    assert grown is None or grown["results"] == 4 * (3000 * 17 + 8 * 16)


def test_no_data(tmp_path: Path) -> None:
    done = run("vocab-training", "--data", tmp_path / "none", "--out", tmp_path)
    assert done.exit_code == 2
    assert "--data must be a folder with train.txt and valid.txt" in done.output


def test_scaling_is_resumed(tmp_path: Path) -> None:
    given = [
        "vocab-scaling",
        "--width",
        "8",
        "--tokens",
        "6",
        "--samples",
        "5",
        "--seconds",
        "0",
        "--sizes",
        "50",
    ]
    document_of(*given, out=tmp_path)
    done = run(*given, "--sizes", 90, "--out", tmp_path)
    assert done.stderr.count("was measured before") == 1
    document = json.loads((tmp_path / "vocab-scaling.json").read_text(encoding="utf-8"))
    assert [point["vocab"] for point in document["points"]] == [50, 90]
    for point in document["points"]:
        assert list(point["timing"]) == list(vocab_scaling.KINDS)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".png", ".svg"}


def test_a_wrong_answer_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Output("full", 8, torch.ones(50), samples=5)
    hidden, targets = torch.randn(2, 8), torch.tensor([1, 2])
    check(output, hidden, targets)
    monkeypatch.setattr(Output, "total", lambda *_: torch.tensor(1.0))
    with pytest.raises(AssertionError):
        check(output, hidden, targets)


def test_goals_are_read_from_the_results() -> None:
    def result(kind: str, perplexity: float, faster: float) -> dict[str, Any]:
        timing = {"training step": {"faster": faster}}
        return {"kind": kind, "perplexity": perplexity, "timing": timing}

    document = {"results": [result("full", 100.0, 1.0), result("adaptive", 104.0, 2.0)]}
    lines = [line.split() for line in goals.lines_of(document, goals.VOCAB)[1:]]
    assert [line[-1] for line in lines] == ["yes", "NO", "measured"]
