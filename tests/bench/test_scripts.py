"""The scripts of `benchmarks/`: the goals, the standard set, and training with a filter."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as standard  # noqa: E402
from benchmarks import goals, wikitext_filter  # noqa: E402
from lmhead.cli.bench import command  # noqa: E402

sys.path.remove(str(ROOT))


def write(folder: Path, name: str, document: object) -> None:
    (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")


def test_goals_are_read_from_files(tmp_path: Path) -> None:
    assert all("no file" in line for line in goals.lines(tmp_path)[1:])
    ratios = {"compile": {"median": 0.8}, "eager": {"median": 0.71}}
    write(tmp_path, goals.LOSS, {"results": [{"name": "lmhead", "ratios": ratios}]})
    write(tmp_path, goals.SCALING, {"series": [{"exponent": 1.01}, {"exponent": 0.99}]})
    curves = {"exact": [{"valid": 6.32}], "filter": [{"valid": 6.325}]}
    write(tmp_path, goals.TRAINED, {"curves": curves})
    lines = {line.split("  ")[0]: line.split() for line in goals.lines(tmp_path)[1:]}
    assert lines["loss, exact / torch.compile"][-2:] == ["0.8", "yes"]
    assert lines["loss, exact / eager torch"][-2:] == ["0.71", "NO"]
    assert lines["loss, grad_filter=0.02 / eager torch"][-1] == "measured"
    assert lines["time grows with V and N to the power"][-2:] == ["1.01", "yes"]
    assert lines["trained with the filter, loss off by"][-1] == "yes"


def test_memory_goals_look_at_the_worst(tmp_path: Path) -> None:
    shape = {"name": "131072x64"}
    rows = [
        {"name": "loss/lmhead", "shape": shape, "first": 100 * 2**20, "temporary": 50},
        {"name": "query/lmhead", "shape": shape, "first": 0, "temporary": 70},
        {"name": "query/lmhead", "shape": shape, "skipped": "no"},
    ]
    write(tmp_path, goals.MEMORY, {"max_bytes": 64, "results": rows})
    text = "\n".join(goals.lines(tmp_path))
    assert any(line.split()[-2:] == ["100", "yes"] for line in text.splitlines())
    assert any(line.split()[-2:] == ["1.09", "NO"] for line in text.splitlines())


@pytest.mark.parametrize("line", standard.STANDARD + standard.OTHER_SHAPES + standard.QUICK)
def test_the_standard_set_is_made_of_commands_that_exist(line: str) -> None:
    name, *options = line.split()
    found = command.commands[name]
    found.make_context(name, [*options, "--out", "x", "--threads", "2"])


def test_the_files_of_the_goals_are_those_of_the_standard_set() -> None:
    assert goals.LOSS == "loss-smollm2-2048-float32"
    assert "loss --shape smollm2 --dtype bfloat16 --tokens 256" in standard.STANDARD
    assert goals.HALF == "loss-smollm2-256-bfloat16"


def gradients(
    keep_mass: bool, scale: float = 3.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = (scale * torch.randn(200, 8)).requires_grad_()
    weight = torch.randn(20_000, 8).requires_grad_()
    targets = torch.randint(20_000, (200,))
    loss = wikitext_filter.LOSSES["threshold" if keep_mass else "dropped"](hidden, weight, targets)
    exact = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    return d_hidden, d_weight, torch.autograd.grad(exact, weight)[0]


def test_the_dropped_tail_leaves_words_without_gradient() -> None:
    _, dropped, _ = gradients(keep_mass=False)
    _, kept, exact = gradients(keep_mass=True)
    silent = (dropped == 0).all(1)
    assert 0.1 < float(silent.double().mean()) < 1
    assert not (kept == 0).all(1).any()
    assert (kept - exact).norm() < (dropped - exact).norm()


def test_training_runs_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "the cat sat on the mat and the dog saw it \n"
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text(words * 20, encoding="utf-8")
    options = f"--data {tmp_path} --out {tmp_path}/w.json --steps 4 --every 2 --batch 2 --window 8"
    options += " --width 32 --layers 1 --valid-tokens 64"
    monkeypatch.setattr(sys, "argv", ["wikitext_filter.py", *options.split()])
    wikitext_filter.main()
    document = json.loads((tmp_path / "w.json").read_text(encoding="utf-8"))
    assert list(document["curves"]) == ["exact", "filter", "threshold", "dropped"]
    assert [point["step"] for point in document["curves"]["exact"]] == [2, 4]
    assert "valid" in capsys.readouterr().out
