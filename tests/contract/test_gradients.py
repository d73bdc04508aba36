"""Gradients: per row, per side, over micro-batches, and in half precision."""

import pytest
import torch
from compare import assert_close
from torch_watch import count_products

from contract.cases import Options, assert_true, inputs, probabilities, run
from contract.implementations import TORCH, Implementation, every_implementation


@every_implementation()
@pytest.mark.parametrize("soft", [False, True], ids=["ids", "probabilities"])
def test_each_row_gets_its_own_upstream_gradient(
    implementation: Implementation, soft: bool
) -> None:
    """Liger 968, 872, 488: every row got the gradient of row 0."""
    hidden, weight, bias, targets = inputs()
    if soft:
        targets = probabilities(11, 37)
    else:
        targets[4] = -100
    upstream = torch.linspace(-2.0, 3.0, 11, dtype=torch.float64)
    options: Options = {
        "bias": bias,
        "reduction": "none",
        "upstream": upstream,
        "label_smoothing": 0.1,
    }
    outcome = run(implementation, hidden, weight, targets, **options)
    assert_true(outcome, hidden, weight, targets, **options)


@every_implementation()
def test_upstream_gradients_of_a_batch_of_sequences(implementation: Implementation) -> None:
    """Advantages of a policy gradient: one per token, (batch, time), some 0."""
    hidden, weight, bias, targets = inputs(4, 6)
    upstream = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).view(4, 6).T.reshape(4, 6)
    upstream[1] = 0.0
    options: Options = {"bias": bias, "reduction": "none", "upstream": upstream}
    outcome = run(implementation, hidden, weight, targets, **options)
    assert_true(outcome, hidden, weight, targets, **options)


@every_implementation()
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_scaled_loss_scales_its_gradients(implementation: Implementation, reduction: str) -> None:
    """Loss scaling, and losses that are added up: the upstream gradient is not always 1."""
    hidden, weight, bias, targets = inputs()
    upstream = torch.tensor(-512.5, dtype=torch.float64)
    options: Options = {"bias": bias, "reduction": reduction, "upstream": upstream}
    outcome = run(implementation, hidden, weight, targets, **options)
    assert_true(outcome, hidden, weight, targets, **options)


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@every_implementation()
def test_a_frozen_side_has_no_gradient_and_the_other_is_right(
    implementation: Implementation, reduction: str, trained: str
) -> None:
    """Liger gates everything on the hidden state's requires_grad."""
    case = inputs()
    tensors = {
        name: value.clone().requires_grad_(name == trained)
        for name, value in case._asdict().items()
        if name != "targets"
    }
    loss = implementation.loss(
        tensors["hidden"],
        tensors["weight"],
        case.targets,
        bias=tensors["bias"],
        reduction=reduction,
    )
    loss.sum().backward()  # type: ignore[no-untyped-call]
    full = run(TORCH, *case[:2], case.targets, bias=case.bias, reduction=reduction)
    for name, tensor in tensors.items():
        if name == trained:
            assert_close(tensor.grad, getattr(full.grads, name), rtol=1e-10, atol=1e-12)
        else:
            assert tensor.grad is None


@every_implementation()
def test_nothing_to_train_gives_no_graph(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs()
    loss = implementation.loss(hidden, weight, targets, bias=bias)
    assert not loss.requires_grad
    with torch.no_grad():
        loss = implementation.loss(hidden.requires_grad_(), weight, targets, bias=bias)
    assert not loss.requires_grad


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("trained", "products"),
    [((), 1), (("hidden",), 2), (("weight",), 2), (("hidden", "weight"), 3)],
)
@every_implementation(needs={"three products"})
def test_a_frozen_side_costs_nothing(
    implementation: Implementation, trained: tuple[str, ...], products: int, reduction: str
) -> None:
    """One product of N x V x D for the logits, and one for each gradient that is asked for."""
    hidden, weight, _, targets = inputs(64, vocab=503, dim=16, dtype=torch.float32)
    hidden.requires_grad_("hidden" in trained)
    weight.requires_grad_("weight" in trained)

    def step() -> None:
        loss = implementation.loss(hidden, weight, targets, reduction=reduction)
        if trained:
            loss.backward()  # type: ignore[no-untyped-call]

    # A little more is granted for the rows of the targets, asked for one by one.
    assert count_products(step, 64, 16, 503) <= products + 0.05


@every_implementation(needs={"num_items"})
@pytest.mark.parametrize("as_tensor", [False, True], ids=["int", "tensor"])
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"z_loss": 0.02}, {"softcap": 4.0, "label_smoothing": 0.2}],
    ids=str,
)
def test_micro_batches_with_num_items_add_up_to_one_batch(
    implementation: Implementation, options: Options, as_tensor: bool
) -> None:
    """transformers 34191 and 35203, Liger 802: means of unequal parts are not the mean."""
    hidden, weight, bias, targets = inputs(24)
    targets[[0, 1, 2, 3, 4, 11, 23]] = -100
    kept = (targets != -100).sum()
    num_items = kept if as_tensor else int(kept)
    whole = run(implementation, hidden, weight, targets, bias=bias, **options)
    parts = [
        run(
            implementation,
            hidden[rows],
            weight,
            targets[rows],
            bias=bias,
            num_items=num_items,
            **options,
        )
        for rows in (slice(0, 5), slice(5, 8), slice(8, 24))
    ]
    assert_close(sum(p.loss for p in parts), whole.loss, rtol=1e-11)
    hidden_grad = torch.cat([p.grads.hidden for p in parts])
    assert_close(hidden_grad, whole.grads.hidden, rtol=1e-10, atol=1e-13)
    for name in ("weight", "bias"):
        total = sum(getattr(p.grads, name) for p in parts)
        assert_close(total, getattr(whole.grads, name), rtol=1e-10, atol=1e-13)


@every_implementation(needs={"num_items"})
def test_num_items_is_the_denominator_of_everything(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs()
    targets[0] = -100
    class_weight = torch.linspace(0.5, 2.0, 37, dtype=torch.float64)
    for options in ({"class_weight": class_weight}, {"z_loss": 0.1}, {"label_smoothing": 0.1}):
        total = implementation.loss(hidden, weight, targets, bias=bias, reduction="sum", **options)
        loss = implementation.loss(hidden, weight, targets, bias=bias, num_items=4, **options)
        assert_close(loss, total / 4, rtol=1e-12)
    soft = probabilities(11, 37)
    outcome = run(implementation, hidden, weight, soft, bias=bias, num_items=4)
    assert_true(outcome, hidden, weight, soft, bias=bias, num_items=4)


@every_implementation()
def test_gradients_accumulate_over_calls(implementation: Implementation) -> None:
    hidden, weight, _, targets = inputs()
    weight.requires_grad_()
    for _ in range(3):
        implementation.loss(hidden, weight, targets).backward()  # type: ignore[no-untyped-call]
    once = run(implementation, hidden, weight, targets)
    assert_close(weight.grad, 3 * once.grads.weight, rtol=1e-10, atol=1e-13)


@every_implementation()
def test_a_tied_weight_gets_the_sum_of_both_gradients(implementation: Implementation) -> None:
    _, weight, _, targets = inputs()
    ids = torch.arange(11)
    tied = weight.clone().requires_grad_()
    implementation.loss(tied[ids], tied, targets).backward()  # type: ignore[no-untyped-call]
    apart = run(implementation, weight[ids], weight, targets)
    expected = apart.grads.weight.index_add(0, ids, apart.grads.hidden)
    assert_close(tied.grad, expected, rtol=1e-10, atol=1e-13)
