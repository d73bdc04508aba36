"""The benchmark of heads for huge vocabularies at tiny size: it runs, goes on, checks itself."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import goals  # noqa: E402
from benchmarks.vocab_heads import report, scaling, timing, training  # noqa: E402
from benchmarks.vocab_heads.heads import HEADS, QUESTIONS, Output, check  # noqa: E402

sys.path.remove(str(ROOT))


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments)])
    module.main()


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A text of 80 words, the first the most frequent; one is only in the validation text."""
    torch.manual_seed(0)
    ids = (1 / torch.arange(1, 81)).multinomial(2000, replacement=True).view(50, 40)
    lines = [" ".join(f"w{i}" for i in row) for row in ids.tolist()]
    (tmp_path / "train.txt").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "valid.txt").write_text("new " + "\n".join(lines[:5]), encoding="utf-8")
    return tmp_path


TINY = "--batch 4 --window 8 --width 32 --layers 1 --steps 4 --every 2 --samples 5"
TINY += " --valid-tokens 40 --timing-seconds 0"


def test_training_of_all_heads_goes_on_where_it_was(
    words: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grown = {"first": 3 * 2**20, "later": 2 * 2**20, "results": 2**20, "temporary": 2**20}
    monkeypatch.setattr(training, "memory", lambda *_: grown)
    out, work = words / "heads.json", words / "work"
    options = ["--data", words, "--out", out, "--work", work, *TINY.split()]
    run(training, monkeypatch, *options, "--head", "full", "--head", "adaptive")
    first = json.loads(out.read_text(encoding="utf-8"))
    assert [r["kind"] for r in first["results"]] == ["full", "adaptive"]
    assert "was trained before" not in capsys.readouterr().out

    run(training, monkeypatch, *options)
    printed = capsys.readouterr().out
    assert printed.count("was trained before") == 2
    document = json.loads(out.read_text(encoding="utf-8"))
    assert [r["kind"] for r in document["results"]] == list(HEADS)
    assert document["results"][0]["curve"] == first["results"][0]["curve"]
    for result in document["results"]:
        assert [point["step"] for point in result["curve"]] == [2, 4]
        # Words know their frequencies from the start, so none is far from the others.
        assert 20 < result["perplexity"] < 120
        assert set(result["timing"]) == set(QUESTIONS)
        assert len(result["timing"]["argmax"]["seconds"]) == 3
    assert document["results"][0]["timing"]["argmax"]["faster"] == 1
    assert "torch full" in [p["name"] for p in document["peers"]]
    assert "adaptive head, perplexity / full" in printed
    assert {p.suffix for p in words.glob("heads.*")} == {".json", ".png", ".svg"}

    run(training, monkeypatch, *options, "--head", "full", "--seed", "1")
    assert "was trained before" not in capsys.readouterr().out


def test_the_heads_of_torch_are_timed_on_what_ours_have_learned() -> None:
    from benchmarks.vocab_heads.peers import peer

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


def test_memory_is_that_of_a_fresh_process(tmp_path: Path) -> None:
    frequencies = torch.ones(3000)
    output = Output("full", 16, frequencies, samples=5)
    file = tmp_path / "full.pt"
    made = {"head": output.state_dict(), "hidden": torch.randn(8, 16), "frequencies": frequencies}
    made |= {"settings": {"samples": 5}, "targets": torch.arange(8)}
    training.save(made, file)
    grown = timing.memory("full", file)
    assert grown is None or grown["results"] == 4 * (3000 * 17 + 8 * 16)


def test_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(training, monkeypatch, "--data", tmp_path / "nowhere")


def test_scaling_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scaling.json"
    options = ["--out", out, "--width", 8, "--tokens", 6, "--samples", 5, "--seconds", 0]
    run(scaling, monkeypatch, *options, "--sizes", 50)
    run(scaling, monkeypatch, *options, "--sizes", 50, 90)
    assert capsys.readouterr().out.count("was measured before") == 1
    document = json.loads(out.read_text(encoding="utf-8"))
    assert [point["vocab"] for point in document["points"]] == [50, 90]
    for point in document["points"]:
        assert list(point["timing"]) == list(scaling.KINDS)
    assert {p.suffix for p in tmp_path.glob("scaling.*")} == {".json", ".png", ".svg"}


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


def test_milliseconds_have_three_digits() -> None:
    values = [report.milliseconds(s) for s in (0.0123456, 0.25, 0.0001, 12.5)]
    assert values == [
        "12.3 ms",
        "250 ms",
        "0.100 ms",
        "12,500 ms",
    ]
