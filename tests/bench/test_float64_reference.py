"""Expected results in float64, and the errors that are measured against them."""

import math

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close

from benchmarks import float64_reference
from benchmarks.float64_reference import errors, expected_results
from benchmarks.inputs import generate
from benchmarks.loss import TASK as LOSS
from benchmarks.query import TASK as QUERY

INPUTS = generate(300, 12, 40)


def test_loss_is_that_of_plain_torch() -> None:
    hidden = INPUTS.hidden.double().requires_grad_()
    weight = INPUTS.weight.double().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, INPUTS.targets)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    right = expected_results("loss", INPUTS)
    assert_close(right["loss"], loss.detach(), atol=1e-12)
    assert_close(right["hidden_grad"], d_hidden, atol=1e-12)
    assert_close(right["weight_grad"], d_weight, atol=1e-12)


def test_chunks_and_tiles_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {task: expected_results(task, INPUTS, top_k=5) for task in ("loss", "query")}
    monkeypatch.setattr(float64_reference, "_CHUNK", 7 * 300)
    monkeypatch.setattr(float64_reference, "_TILE", 64)
    for task, right in whole.items():
        for name, tensor in expected_results(task, INPUTS, top_k=5).items():
            assert_close(tensor, right[name], atol=1e-12)


def test_some_rows_of_large_results(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = expected_results("loss", INPUTS)
    monkeypatch.setattr(float64_reference, "_FULL", 0)
    monkeypatch.setattr(float64_reference, "_SOME_ROWS", 7)
    monkeypatch.setattr(float64_reference, "_SOME_TOKENS", 20)
    some = expected_results("loss", INPUTS)
    rows, tokens = some["hidden_grad.rows"], some["weight_grad.rows"]
    assert len(rows) == 7
    assert set(INPUTS.targets.tolist()) <= set(tokens.tolist())
    assert len(tokens) < 300
    assert_close(some["loss"], whole["loss"], atol=1e-12)
    assert_close(some["hidden_grad"], whole["hidden_grad"][rows], atol=1e-12)
    assert_close(some["weight_grad"], whole["weight_grad"][tokens], atol=1e-12)
    results = {"weight_grad": whole["weight_grad"].clone()}
    assert errors(results, some) == {"weight_grad": pytest.approx(0, abs=1e-12)}
    results["weight_grad"][INPUTS.targets[0]] *= 2
    assert errors(results, some)["weight_grad"] > 0.01


def test_answers_put_the_lowest_id_first_among_equals() -> None:
    hidden, weight = torch.ones(1, 2), torch.tensor([[0.0, 0], [1, 0], [0, 1], [1, 0], [-1, 0]])
    inputs = type(INPUTS)(hidden, weight, torch.tensor([3]), "by hand", 0.0)
    right = expected_results("query", inputs, top_k=4)
    assert right["top_k"].tolist() == [[1, 2, 3, 0]]
    assert right["argmax"].tolist() == [1]
    assert right["rank"].tolist() == [2]
    p = torch.tensor([0.0, 1, 1, 1, -1]).double().softmax(0)
    assert_close(right["log_prob"], p[3].log()[None], atol=1e-12)
    assert_close(right["entropy"], -(p * p.log()).sum()[None], atol=1e-12)


def test_nan_and_a_wrong_shape_do_not_pass() -> None:
    right = {"loss": torch.tensor(1.0), "hidden_grad": torch.ones(4)}
    found = errors({"loss": torch.tensor(math.nan)}, right)
    assert LOSS.too_far("eager", "float32", found) == ["loss"]
    with pytest.raises(ValueError, match="hidden_grad must have shape"):
        errors({"hidden_grad": torch.ones(3)}, right)


def test_the_fraction_of_wrong_ids() -> None:
    right = {"top_k": torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])}
    found = errors({"top_k": torch.tensor([[1, 2], [4, 3], [5, 6], [7, 8]])}, right)
    assert found == {"top_k": 0.25}
    assert QUERY.too_far("lmhead", "float32", found) == ["top_k"], "ours are exact"
    assert QUERY.too_far("eager", "bfloat16", found) == [], "rounded logits tie"
