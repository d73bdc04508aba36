"""Tokens with logit -inf: forbidden ones, and the padding that rounds a vocabulary up.

They have probability 0. They take no mass, get no gradient, and put no NaN or inf anywhere; only
a target that is itself forbidden costs +inf.
"""

import pytest
import torch
from compare import assert_close
from torch import Tensor

from contract.cases import Inputs, Options, Outcome, assert_true, inputs, probabilities, run
from contract.implementations import Implementation, every_implementation

REAL = 30  # of 37 tokens


def padded() -> Inputs:
    """The last 7 of 37 tokens are padding: rows of rubbish, and a bias of -inf."""
    hidden, weight, bias, targets = inputs()
    weight[REAL:] = 1e3 * weight[REAL:]
    bias[REAL:] = -torch.inf
    return Inputs(hidden, weight, bias, targets.remainder(REAL))


def assert_padding_changes_nothing(outcome: Outcome, unpadded: Outcome) -> None:
    assert_close(outcome.loss, unpadded.loss, rtol=1e-11)
    assert_close(outcome.grads.hidden, unpadded.grads.hidden, rtol=1e-10, atol=1e-13)
    for ours, expected in zip(outcome.grads[1:], unpadded.grads[1:], strict=True):
        assert_close(ours[:REAL], expected, rtol=1e-10, atol=1e-13)
        assert_close(ours[REAL:], torch.zeros_like(ours[REAL:]))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@every_implementation()
def test_padding_of_the_vocabulary_gets_no_mass(
    implementation: Implementation, reduction: str
) -> None:
    hidden, weight, bias, targets = padded()
    outcome = run(implementation, hidden, weight, targets, bias=bias, reduction=reduction)
    unpadded = run(
        implementation, hidden, weight[:REAL], targets, bias=bias[:REAL], reduction=reduction
    )
    assert_padding_changes_nothing(outcome, unpadded)


@every_implementation(
    needs={"map"}, torch_differs="cap · tanh(-inf / cap) = -cap brings a masked word back"
)
def test_softcap_does_not_revive_padding(implementation: Implementation) -> None:
    """unsloth 10616: padded columns under a soft cap took 48 % of the mass."""
    hidden, weight, bias, targets = padded()
    outcome = run(implementation, hidden, weight, targets, bias=bias, softcap=3.0, scale=0.5)
    unpadded = run(
        implementation, hidden, weight[:REAL], targets, bias=bias[:REAL], softcap=3.0, scale=0.5
    )
    assert_padding_changes_nothing(outcome, unpadded)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@every_implementation(torch_differs="smoothing multiplies log 0 = -inf by ε / V: the loss is inf")
def test_smoothing_gives_masked_tokens_no_share(
    implementation: Implementation, weighted: bool, reduction: str
) -> None:
    hidden, weight, bias, targets = padded()
    class_weight = torch.linspace(0.5, 2.0, 37, dtype=torch.float64) if weighted else None
    options: Options = {
        "label_smoothing": 0.1,
        "class_weight": class_weight,
        "reduction": reduction,
    }
    outcome = run(implementation, hidden, weight, targets, bias=bias, **options)
    assert outcome.loss.isfinite().all()
    assert_true(outcome, hidden, weight, targets, bias=bias, **options)


@every_implementation(torch_differs="0 · log 0 = 0 · -inf = NaN for probabilities")
def test_a_soft_target_of_zero_on_a_masked_token_costs_nothing(
    implementation: Implementation,
) -> None:
    hidden, weight, bias, _ = padded()
    soft = probabilities(11, 37)
    soft[:, REAL:] = 0.0
    for label_smoothing in (0.0, 0.1):
        options: Options = {"bias": bias, "label_smoothing": label_smoothing}
        outcome = run(implementation, hidden, weight, soft, **options)
        assert outcome.loss.isfinite()
        assert_true(outcome, hidden, weight, soft, **options)


@every_implementation()
def test_a_forbidden_target_costs_infinity(implementation: Implementation) -> None:
    hidden, weight, bias, targets = padded()
    targets[3] = REAL + 2
    loss = implementation.loss(hidden, weight, targets, bias=bias, reduction="none")
    assert_close(loss[3], torch.inf)
    assert loss[torch.arange(11) != 3].isfinite().all()
    assert_close(implementation.loss(hidden, weight, targets, bias=bias), torch.inf)


@every_implementation()
def test_an_ignored_row_may_have_any_logits(implementation: Implementation) -> None:
    """ignore_index as a token that is masked: the row is ignored, not infinite."""
    hidden, weight, bias, targets = padded()
    targets[3] = 36
    options: Options = {"bias": bias, "ignore_index": 36}
    outcome = run(implementation, hidden, weight, targets, **options)
    assert_true(outcome, hidden, weight, targets, **options)


@pytest.mark.parametrize("left", [0, 17, 36])
@every_implementation()
def test_one_token_left(implementation: Implementation, left: int) -> None:
    """Only one token is allowed: its probability is 1, the loss and every gradient 0."""
    hidden, weight, _, _ = inputs()
    bias = torch.full((37,), -torch.inf, dtype=torch.float64)
    bias[left] = 0.5
    targets = torch.full((11,), left)
    outcome = run(implementation, hidden, weight, targets, bias=bias)
    assert_close(outcome.loss, 0.0, atol=1e-12)
    for grad in outcome.grads:
        assert_close(grad, torch.zeros_like(grad), atol=1e-12)


@every_implementation()
def test_masking_holds_in_every_tile(implementation: Implementation) -> None:
    """Whole tiles may be masked, at the front, in the middle and at the end."""
    hidden, weight, bias, _ = inputs(vocab=301)
    for masked in (slice(0, 120), slice(90, 210), slice(180, 301)):
        cut: Tensor = bias.clone()
        cut[masked] = -torch.inf
        allowed = cut.isfinite().nonzero().squeeze(1)
        targets = allowed[torch.arange(11) * 7]
        outcome = run(implementation, hidden, weight, targets, bias=cut)
        assert_true(outcome, hidden, weight, targets, bias=cut)


@every_implementation(needs={"z_loss"})
def test_z_loss_with_masked_tokens(implementation: Implementation) -> None:
    hidden, weight, bias, targets = padded()
    outcome = run(implementation, hidden, weight, targets, bias=bias, z_loss=0.1)
    assert_true(outcome, hidden, weight, targets, bias=bias, z_loss=0.1)
