"""A plain loss of few logits is computed without a sweep: same numbers, few operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from compare import assert_close
from contract.cases import Inputs, Options, assert_true, inputs, run
from contract.implementations import Functional
from lazy_and_dense import backward
from torch_watch import Allocations, no_tensor_of

from lmhead import LMHead, linear_cross_entropy
from lmhead.sweep.small_batch import small_loss

USED_BY = "lmhead.sweep.swept_scores.small_loss"
ROWS, VOCAB = 67, 41
OURS = Functional("", None)
OPTIONS: dict[str, Options] = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "num_items": {"num_items": 50},
    "smooth": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.01},
    "weighted": {"class_weight": torch.linspace(0.5, 2, VOCAB)},
    "softcap": {"softcap": 4.0, "scale": 0.7},
    "all": {
        "label_smoothing": 0.2,
        "z_loss": 0.03,
        "class_weight": torch.linspace(0.0, 2, VOCAB),
        "softcap": 6.0,
        "num_items": 31,
    },
}


def case() -> Inputs:
    return inputs(ROWS, vocab=VOCAB, dim=9, dtype=torch.float32)


@contextmanager
def without_sweep(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each loss in the block was computed without a sweep."""
    found: list[bool] = []

    def watched(*arguments: Any) -> Any:
        found.append((made := small_loss(*arguments)) is not None)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(USED_BY, watched)
        yield found


PLAIN = ("plain", "sum", "num_items")


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("options", OPTIONS)
def test_agrees_with_the_reference_and_the_sweep(
    options: str, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, bias, targets = case()
    bias[5:8] = -torch.inf
    targets[(targets >= 5) & (targets < 8)] = 0
    given = OPTIONS[options] | ({"bias": bias} if biased else {})
    upstream = torch.tensor(1.7)
    with without_sweep(monkeypatch) as found:
        short = run(OURS, hidden, weight, targets, upstream=upstream, **given)
    assert found == [options in PLAIN]
    atol = 1e-4 if options == "sum" else 1e-6
    assert_true(short, hidden, weight, targets, upstream=upstream, rtol=1e-5, atol=atol, **given)
    monkeypatch.setattr(USED_BY, lambda *_: None)
    general = run(OURS, hidden, weight, targets, upstream=upstream, **given)
    assert_close(short.loss, general.loss, rtol=2e-7)
    for ours, theirs in zip(short.grads, general.grads, strict=True):
        if theirs is not None:
            assert_close(ours, theirs, rtol=1e-5, atol=atol)


def test_only_what_is_wanted_gets_a_gradient() -> None:
    hidden, weight, bias, targets = case()
    whole = run(OURS, hidden, weight, targets, bias=bias).grads
    for wanted in range(3):
        leaves = [t.detach().clone() for t in (hidden, weight, bias)]
        leaves[wanted].requires_grad_()
        backward(linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2]))
        assert [t.grad is not None for t in leaves] == [number == wanted for number in range(3)]
        assert_close(leaves[wanted].grad, whole[wanted])


def test_a_forbidden_target_costs_infinity_and_a_nan_stays_in_its_row() -> None:
    hidden, weight, bias, targets = case()
    bias[3], targets[0] = -torch.inf, 3
    assert run(OURS, hidden, weight, targets, bias=bias).loss == torch.inf
    hidden[40] = torch.nan
    outcome = run(OURS, hidden, weight, targets)
    assert outcome.loss.isnan()
    assert outcome.grads.hidden[40].isnan().all()
    assert outcome.grads.hidden[torch.arange(ROWS) != 40].isfinite().all()


CHANGES = ["ignored token", "float64", "filter", "low rank", "probabilities", "little memory"]


@pytest.mark.parametrize("change", CHANGES)
def test_all_else_is_swept(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = case()
    options: Options = {}
    ours = Functional("", ROWS * VOCAB * 2) if change == "little memory" else OURS
    if change == "ignored token":
        targets[9] = -100
        hidden[9] = torch.nan  # which costs nothing there
    elif change == "float64":
        hidden, weight = hidden.double(), weight.double()
    elif change == "filter":
        options["grad_filter"] = 0.01
    elif change == "probabilities":
        targets = torch.rand(ROWS, VOCAB).softmax(-1)
    with without_sweep(monkeypatch) as found:
        if change == "low rank":
            head = LMHead(9, VOCAB).add_low_rank(2)
            backward(torch.nn.functional.cross_entropy(head(hidden), targets))
        else:
            outcome = run(ours, hidden, weight, targets, **options)
            assert outcome.loss.isfinite()
    assert not any(found)


def test_second_derivatives() -> None:
    hidden, weight, _, targets = case()
    hidden.requires_grad_()
    first = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True
    )[0]
    dense = torch.nn.functional.cross_entropy(hidden @ weight.T, targets)
    truth = torch.autograd.grad(dense, hidden, create_graph=True)[0]
    ours, theirs = (torch.autograd.grad(g.square().sum(), hidden)[0] for g in (first, truth))
    assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_no_tile_is_as_large_as_the_logits_and_operations_are_few() -> None:
    hidden, weight, bias, targets = inputs(768, vocab=65, dim=16, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    with no_tensor_of(768, 65):
        backward(linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2]))
    with Allocations() as watch:
        backward(linear_cross_entropy(leaves[0], leaves[1], targets, num_items=768))
    assert len(watch.operations) < 60
