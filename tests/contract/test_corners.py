"""Every corner that `F.cross_entropy` has: the same numbers, shapes and gradients."""

from typing import Any

import oracle
import pytest
import torch
from compare import assert_close
from torch import Tensor

from contract.cases import Options, assert_true, inputs, probabilities, run
from contract.implementations import TORCH, Implementation, every_implementation

REDUCTIONS = ("mean", "sum", "none")
CLASS_WEIGHT = torch.linspace(0.0, 3.0, 37, dtype=torch.float64)


def both(implementation: Implementation, *tensors: Tensor, **options: Any) -> None:
    """The implementation meets the reference, and plain torch, on the same input."""
    outcome = run(implementation, *tensors, **options)
    assert_true(outcome, *tensors, **options)
    torchs = run(TORCH, *tensors, **options)
    assert_close(outcome.loss, torchs.loss, rtol=1e-10, atol=1e-12, dtype=torchs.loss.dtype)
    for name, ours, plain in zip(outcome.grads._fields, outcome.grads, torchs.grads, strict=True):
        if plain is None:
            assert ours is None
        else:
            assert_close(ours, plain, rtol=1e-10, atol=1e-12, dtype=plain.dtype, what=name)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("class_weight", [None, CLASS_WEIGHT], ids=["unweighted", "weighted"])
@every_implementation()
def test_ids(
    implementation: Implementation,
    reduction: str,
    label_smoothing: float,
    class_weight: Tensor | None,
) -> None:
    hidden, weight, bias, targets = inputs()
    targets[2:4] = -100
    both(
        implementation,
        hidden,
        weight,
        targets,
        bias=bias,
        reduction=reduction,
        label_smoothing=label_smoothing,
        class_weight=class_weight,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("class_weight", [None, CLASS_WEIGHT], ids=["unweighted", "weighted"])
@every_implementation()
def test_probabilities(
    implementation: Implementation,
    reduction: str,
    label_smoothing: float,
    class_weight: Tensor | None,
) -> None:
    hidden, weight, bias, _ = inputs()
    both(
        implementation,
        hidden,
        weight,
        probabilities(11, 37),
        bias=bias,
        reduction=reduction,
        label_smoothing=label_smoothing,
        class_weight=class_weight,
    )


@every_implementation()
def test_probabilities_need_not_sum_to_one(implementation: Implementation) -> None:
    hidden, weight, bias, _ = inputs()
    both(implementation, hidden, weight, 2.5 * probabilities(11, 37), bias=bias)


@pytest.mark.parametrize("ignore_index", [-1, 0, 36, 1000])
@every_implementation()
def test_another_ignore_index(implementation: Implementation, ignore_index: int) -> None:
    """Also the id of a token of the vocabulary: it is no target then, but keeps its mass."""
    hidden, weight, bias, targets = inputs()
    targets[[0, 5, 6]] = ignore_index
    both(implementation, hidden, weight, targets, bias=bias, ignore_index=ignore_index)
    both(
        implementation,
        hidden,
        weight,
        targets,
        ignore_index=ignore_index,
        label_smoothing=0.2,
        class_weight=CLASS_WEIGHT,
    )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [(1,), (2, 3), (2, 1, 4)])
@every_implementation()
def test_leading_dimensions(
    implementation: Implementation, rows: tuple[int, ...], reduction: str
) -> None:
    hidden, weight, bias, targets = inputs(*rows)
    both(implementation, hidden, weight, targets, bias=bias, reduction=reduction)
    both(implementation, hidden, weight, probabilities(*rows, 37), reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@every_implementation()
def test_one_vector_and_one_target(implementation: Implementation, reduction: str) -> None:
    hidden, weight, bias, targets = inputs(1)
    both(implementation, hidden[0], weight, targets[0], bias=bias, reduction=reduction)
    both(implementation, hidden[0], weight, probabilities(37), bias=bias, reduction=reduction)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("rows", [(0,), (0, 3), (2, 0)])
@every_implementation()
def test_no_rows(implementation: Implementation, rows: tuple[int, ...], reduction: str) -> None:
    hidden, weight, bias, targets = inputs(*rows)
    both(implementation, hidden, weight, targets, bias=bias, reduction=reduction)
    both(implementation, hidden, weight, probabilities(*rows, 37), reduction=reduction)


@every_implementation()
def test_the_mean_of_no_rows_is_nan_and_its_gradient_zero(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs(0)
    outcome = run(implementation, hidden, weight, targets, bias=bias)
    assert_true(outcome, hidden, weight, targets, bias=bias, equal_nan=True)
    assert outcome.loss.isnan()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@every_implementation()
def test_a_vocabulary_of_one_token(implementation: Implementation, reduction: str) -> None:
    hidden, weight, bias, targets = inputs(vocab=1)
    both(implementation, hidden, weight, targets, bias=bias, reduction=reduction)
    outcome = run(implementation, hidden, weight, targets, bias=bias, label_smoothing=0.3)
    assert_close(outcome.loss, 0.0, atol=1e-15)


@every_implementation()
def test_one_feature(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs(dim=1)
    both(implementation, hidden, weight, targets, bias=bias)


@every_implementation()
def test_tensors_that_are_not_contiguous(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs(22, vocab=74, dim=10)
    class_weight = torch.linspace(0.5, 2.0, 74, dtype=torch.float64)[1::2]
    targets = targets.remainder(37)
    both(
        implementation,
        hidden[::2, ::2],
        weight[::2, 1::2],
        targets[1::2],
        bias=bias[::2],
        class_weight=class_weight,
    )
    both(implementation, hidden.T.contiguous().T, weight.T.contiguous().T, targets)
    soft = probabilities(74, 22).T
    both(implementation, hidden, weight, soft, bias=bias)


@every_implementation()
def test_a_batch_in_transposed_order(implementation: Implementation) -> None:
    """Sequence first, as PyTorch's own recurrent layers and `nn.Transformer` give it."""
    hidden, weight, bias, targets = inputs(4, 3)
    both(implementation, hidden.transpose(0, 1), weight, targets.T, bias=bias, reduction="none")


@every_implementation()
def test_broadcast_tensors(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs()
    both(
        implementation,
        hidden[:1].expand(11, 5),
        weight[:1].expand(37, 5),
        targets[:1].expand(11),
        bias=bias[:1].expand(37),
        class_weight=CLASS_WEIGHT[9:10].expand(37),
    )
    both(implementation, hidden, weight, probabilities(1, 37).expand(11, 37))


@every_implementation()
def test_the_gradient_of_a_broadcast_row_is_the_sum(implementation: Implementation) -> None:
    hidden, weight, _, targets = inputs()
    row = hidden[0].clone().requires_grad_()
    implementation.loss(row.expand(11, 5), weight, targets, reduction="sum").backward()  # type: ignore[no-untyped-call]
    expected = run(TORCH, row.expand(11, 5), weight, targets, reduction="sum").grads.hidden.sum(0)
    assert_close(row.grad, expected, rtol=1e-10)


@every_implementation(needs={"map"})
def test_scale_and_softcap(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs()
    both(implementation, hidden, weight, targets, bias=bias, scale=0.3)
    both(implementation, hidden, weight, targets, bias=bias, softcap=2.0)
    both(implementation, hidden, weight, targets, bias=bias, softcap=5.0, scale=1.7)
    both(implementation, hidden, weight, targets, scale=-1.0, reduction="none")


@every_implementation(needs={"z_loss"})
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_z_loss(implementation: Implementation, reduction: str) -> None:
    hidden, weight, bias, targets = inputs()
    targets[3] = -100
    options: Options = {"bias": bias, "z_loss": 0.01, "reduction": reduction}
    both(implementation, hidden, weight, targets, **options)
    both(implementation, hidden, weight, targets, class_weight=CLASS_WEIGHT, **options)
    both(implementation, hidden, weight, targets, label_smoothing=0.1, softcap=9.0, **options)
    both(implementation, hidden, weight, probabilities(11, 37), **options)


@every_implementation()
def test_a_nan_in_one_row_stays_in_that_row(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs()
    hidden[4, 1] = torch.nan
    outcome = run(implementation, hidden, weight, targets, bias=bias, reduction="none")
    others = torch.arange(11) != 4
    assert outcome.loss[4].isnan()
    assert outcome.grads.hidden[4].isnan().all()
    clean = run(TORCH, hidden[others], weight, targets[others], bias=bias, reduction="none")
    assert_close(outcome.loss[others], clean.loss, rtol=1e-10)
    assert_close(outcome.grads.hidden[others], clean.grads.hidden, rtol=1e-10, atol=1e-12)


@every_implementation()
def test_large_logits_do_not_overflow(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs(dtype=torch.float32)
    outcome = run(implementation, hidden * 1e4, weight, targets, bias=bias)
    assert_true(outcome, hidden * 1e4, weight, targets, bias=bias, rtol=1e-4, atol=1e-3)


@every_implementation()
def test_a_confident_row_keeps_its_small_loss(implementation: Implementation) -> None:
    """-log p = 4.5e-5 must not drown in the rounding of logits near 1000, as lse - z[y] would.

    These logits are exact in float32, so all that is left is how the loss is put together.
    """
    hidden = torch.ones(5, 1)
    weight = torch.tensor([[1000.0], [990.0], [-1000.0], [0.0]])
    targets = torch.zeros(5, dtype=torch.int64)
    loss = implementation.loss(hidden, weight, targets, reduction="none")
    truth = oracle.linear_cross_entropy(hidden, weight, targets, reduction="none")
    assert_close(loss, truth, atol=1e-7)
