"""Benchmarks that train or score a model, at tiny sizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.running import document_of, run
from benchmarks import train_speed, wikitext_filter
from benchmarks.shakespeare import check_goals


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


def test_the_dropped_tail_leaves_tokens_without_gradient() -> None:
    _, dropped, _ = gradients(keep_mass=False)
    _, kept, exact = gradients(keep_mass=True)
    without_gradient = (dropped == 0).all(1)
    assert 0.1 < float(without_gradient.double().mean()) < 1
    assert not (kept == 0).all(1).any()
    assert (kept - exact).norm() < (dropped - exact).norm()


def test_wikitext_filter(tmp_path: Path) -> None:
    words = "the cat sat on the mat and the dog saw it \n"
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text(words * 20, encoding="utf-8")
    tiny = "--steps 4 --every 2 --batch 2 --window 8 --width 32 --layers 1 --valid-tokens 64"
    document = document_of("wikitext-filter", "--data", tmp_path, *tiny.split(), out=tmp_path)
    assert list(document["curves"]) == ["exact", "filter", "threshold", "dropped"]
    assert [point["step"] for point in document["curves"]["exact"]] == [2, 4]
    written = json.loads((tmp_path / "wikitext-filter.json").read_text(encoding="utf-8"))
    assert written["curves"] == document["curves"]


def test_shakespeare(tmp_path: Path) -> None:
    text = tmp_path / "input.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 60, encoding="utf-8")
    given = ["shakespeare", "--data", text, "--work", tmp_path / "work", "--steps", 2]
    document_of(*given, "--variant", "exact", out=tmp_path)
    document = document_of(*given, "--variant", "exact", "--variant", "dense", out=tmp_path)
    assert list(document["curves"]) == ["exact", "dense"]
    assert [goal["met"] for goal in document["goals"]] == [False, True]
    assert run("shakespeare", "--data", tmp_path / "none", "--out", tmp_path).exit_code == 2


def test_the_goals_of_shakespeare_count_the_worst_step() -> None:
    def made(*losses: float) -> dict[str, Any]:
        return {"train": [[1, losses[0]]], "valid": [[1, loss] for loss in losses]}

    curves = {"exact": made(2.0, 1.5), "dense": made(2.01, 1.5), "filter": made(3.0, 1.501)}
    assert [goal["met"] for goal in check_goals(curves)] == [True, False, True]
    assert check_goals(curves)[1]["value"] == pytest.approx(1 - 2 / 2.01)


SPEED = ["train-speed", "--vocab", 60, "--rounds", 1, "--steps", 1, "--way", "lmhead"]


def test_train_speed(tmp_path: Path) -> None:
    document = document_of(*SPEED, out=tmp_path)
    for made in document["runs"]:
        assert [row["name"] for row in made["results"]] == ["lmhead", "plain"]
        assert made["results"][0]["loss_off_by"] < 1e-4
        assert made["results"][1]["speed_to_plain"] == 1
    assert [made["vocab"] for made in document["runs"]] == [65, 60]


def test_train_speed_finds_a_wrong_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> train_speed.Step:
        step = plain(*given, fused=False)
        return lambda: 1.01 * step()

    plain = train_speed.plain
    monkeypatch.setattr(train_speed, "ours", lambda *given: wrong(*given[:3]))
    done = run(*SPEED, "--out", tmp_path)
    assert done.exit_code == 1
    assert "WRONG" in done.output


def test_score_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl. " * 20, encoding="utf-8")
    document = document_of("score-text", text, "--model", "tiny", out=tmp_path)
    assert document["relative_difference"] < 1e-5
    assert document["perplexity"] == pytest.approx(document["dense_perplexity"], rel=1e-5)
    assert document["text"] == "text.txt"
