"""Rows that do not count: padding, prompts, and batches that consist of nothing else."""

import pytest
import torch
from compare import assert_close
from torch import Tensor

from contract.cases import Inputs, Options, assert_true, inputs, run
from contract.implementations import Implementation, every_implementation

CLASS_WEIGHT = torch.linspace(0.0, 3.0, 37, dtype=torch.float64)


def half_ignored() -> Inputs:
    case = inputs()
    case.targets[[0, 3, 4, 9, 10]] = -100
    return case


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("class_weight", [None, CLASS_WEIGHT], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@every_implementation()
def test_every_row_ignored(
    implementation: Implementation,
    reduction: str,
    class_weight: Tensor | None,
    label_smoothing: float,
) -> None:
    """The mean of nothing is NaN, as in torch, but no gradient of it is: training goes on."""
    hidden, weight, bias, targets = inputs()
    targets[:] = -100
    outcome = run(
        implementation,
        hidden,
        weight,
        targets,
        bias=bias,
        reduction=reduction,
        class_weight=class_weight,
        label_smoothing=label_smoothing,
    )
    if reduction == "mean":
        assert outcome.loss.isnan()
    else:
        assert_close(outcome.loss, torch.zeros(11 if reduction == "none" else ()))
    for grad, tensor in zip(outcome.grads, (hidden, weight, bias), strict=True):
        assert_close(grad, torch.zeros_like(tensor), dtype=tensor.dtype)


@every_implementation(needs={"num_items"})
def test_every_row_ignored_of_a_batch_with_num_items(implementation: Implementation) -> None:
    """One micro-batch of padding among others adds exactly nothing."""
    hidden, weight, bias, targets = inputs()
    targets[:] = -100
    outcome = run(implementation, hidden, weight, targets, bias=bias, num_items=7)
    assert_close(outcome.loss, 0.0)
    for grad in outcome.grads:
        assert_close(grad, torch.zeros_like(grad))


@every_implementation(needs={"z_loss"})
def test_every_row_ignored_with_z_loss(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs()
    targets[:] = -100
    outcome = run(implementation, hidden, weight, targets, bias=bias, z_loss=0.1)
    assert outcome.loss.isnan()
    outcome = run(implementation, hidden, weight, targets, bias=bias, z_loss=0.1, reduction="sum")
    assert_close(outcome.loss, 0.0)
    for grad in outcome.grads:
        assert_close(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("class_weight", [None, CLASS_WEIGHT], ids=["unweighted", "weighted"])
@every_implementation()
def test_ignored_rows_are_as_good_as_absent(
    implementation: Implementation, class_weight: Tensor | None, label_smoothing: float
) -> None:
    """pytorch/pytorch 73205 and 104776: smoothing and class weights counted ignored rows."""
    hidden, weight, bias, targets = half_ignored()
    kept = targets != -100
    for reduction in ("mean", "sum"):
        both = [
            implementation.loss(
                hidden[rows],
                weight,
                targets[rows],
                bias=bias,
                reduction=reduction,
                class_weight=class_weight,
                label_smoothing=label_smoothing,
            )
            for rows in (slice(None), kept)
        ]
        assert_close(both[0], both[1], rtol=1e-12)


@every_implementation()
def test_an_ignored_row_gets_zero_and_gives_zero(implementation: Implementation) -> None:
    hidden, weight, bias, targets = half_ignored()
    ignored = targets == -100
    outcome = run(
        implementation, hidden, weight, targets, bias=bias, reduction="none", label_smoothing=0.1
    )
    assert_close(outcome.loss[ignored], torch.zeros(5))
    assert_close(outcome.grads.hidden[ignored], torch.zeros(5, 5))
    assert (outcome.loss[~ignored] > 0).all()
    assert (outcome.grads.hidden[~ignored] != 0).all()


@every_implementation()
def test_what_comes_back_to_an_ignored_row_is_lost(implementation: Implementation) -> None:
    hidden, weight, bias, targets = half_ignored()
    upstream = torch.linspace(1.0, 2.0, 11, dtype=torch.float64)
    upstream[targets == -100] = 1e300
    options: Options = {"bias": bias, "reduction": "none", "upstream": upstream}
    outcome = run(implementation, hidden, weight, targets, **options)
    assert_true(outcome, hidden, weight, targets, **options)


@every_implementation()
def test_ignoring_does_not_touch_other_rows(implementation: Implementation) -> None:
    """A tile or a chunk made of ignored rows only must not shift its neighbours."""
    hidden, weight, bias, targets = inputs(40)
    full = run(implementation, hidden, weight, targets, bias=bias, reduction="none")
    for start in range(0, 40, 7):
        some = targets.clone()
        some[start : start + 16] = -100
        outcome = run(implementation, hidden, weight, some, bias=bias, reduction="none")
        kept = some != -100
        assert_close(outcome.loss[kept], full.loss[kept], rtol=1e-12)
        assert_close(outcome.grads.hidden[kept], full.grads.hidden[kept], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@every_implementation()
def test_nan_in_an_ignored_row_does_not_reach_the_loss(
    implementation: Implementation, label_smoothing: float
) -> None:
    hidden, weight, bias, targets = half_ignored()
    options: Options = {"bias": bias, "label_smoothing": label_smoothing}
    clean = implementation.loss(hidden, weight, targets, **options)
    hidden[targets == -100] = torch.nan
    assert_close(implementation.loss(hidden, weight, targets, **options), clean, rtol=1e-12)
