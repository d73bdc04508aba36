"""Log-probability and entropy from one distribution, differentiated together.

TRL and SkyRL 2259: the entropy of a masked token was 0 · -inf = NaN. TRL also gives no gradient
through the entropy; reinforcement learning wants both at once, each with its own weight.
"""

from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close, float64
from oracle import Gradients, head_logits, head_logits_backward
from torch import Tensor

from contract.cases import Inputs, Options, inputs
from contract.implementations import Implementation, every_implementation
from lmhead import reference


def masked() -> Inputs:
    case = inputs()
    case.bias[3:9] = -torch.inf
    case.targets[:] = torch.arange(11) + 9
    return case


def assert_answers_and_joint_gradient(
    implementation: Implementation, case: Inputs, **options: Any
) -> None:
    """Both answers, and the gradient of Σ a · log_prob + Σ b · entropy, are the reference's."""
    leaves = [t.detach().clone().requires_grad_() for t in case[:3]]
    rows = case.targets.shape
    a, b = torch.randn(2, *rows, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    log_prob, entropy = implementation.log_prob_and_entropy(
        leaves[0], leaves[1], case.targets, bias=leaves[2], **options
    )
    logits = head_logits(*case[:2], bias=case.bias, **options)
    ids = case.targets.numpy()
    assert_close(log_prob, reference.log_prob(logits, ids), rtol=1e-10, atol=1e-12)
    assert_close(entropy, reference.entropy(logits), rtol=1e-10, atol=1e-12)
    ((a * log_prob).sum() + (b * entropy).sum()).backward()
    expected = _backward(float64(a), float64(b), logits, ids, case, options)
    for name, leaf, true in zip(Gradients._fields, leaves, expected, strict=True):
        assert_close(leaf.grad, true, rtol=1e-9, atol=1e-12, what=f"gradient of {name}")


def _backward(
    a: Array, b: Array, logits: Array, ids: Any, case: Inputs, options: Options
) -> Gradients:
    grad_logits = reference.log_prob_backward(a, logits, ids)
    grad_logits = grad_logits + reference.entropy_backward(b, logits)
    return head_logits_backward(grad_logits, *case[:2], bias=case.bias, **options)


@pytest.mark.parametrize("rows", [(11,), (2, 3), (0,)])
@every_implementation()
def test_log_prob_and_entropy(implementation: Implementation, rows: tuple[int, ...]) -> None:
    assert_answers_and_joint_gradient(implementation, inputs(*rows))


@every_implementation()
def test_one_vector(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs(1)
    case = Inputs(hidden[0], weight, bias, targets[0])
    assert_answers_and_joint_gradient(implementation, case)


@every_implementation(needs={"map"})
def test_with_scale_and_softcap(implementation: Implementation) -> None:
    assert_answers_and_joint_gradient(implementation, inputs(), scale=0.7, softcap=4.0)


@every_implementation(
    torch_differs="Categorical turns -inf into finfo.min; an upstream gradient above 1 overflows"
)
def test_masked_tokens_add_nothing_to_the_entropy(implementation: Implementation) -> None:
    assert_answers_and_joint_gradient(implementation, masked())


@every_implementation(
    needs={"map"}, torch_differs="cap · tanh(-inf / cap) = -cap brings a masked word back"
)
def test_softcap_does_not_revive_masked_tokens(implementation: Implementation) -> None:
    assert_answers_and_joint_gradient(implementation, masked(), softcap=3.0)


@every_implementation()
def test_tokens_whose_probability_underflows(implementation: Implementation) -> None:
    """exp(-2000) is 0 in every dtype, and the logit is finite."""
    case = inputs()
    case.bias[::2] = -2000.0
    case.targets[:] = 2 * torch.arange(11) + 1
    assert_answers_and_joint_gradient(implementation, case)


@every_implementation()
def test_a_certain_word_has_entropy_zero(implementation: Implementation) -> None:
    hidden, weight, _, _ = inputs()
    bias = torch.full((37,), -torch.inf, dtype=torch.float64)
    bias[8] = 1.0
    ids = torch.full((11,), 8)
    log_prob, entropy = implementation.log_prob_and_entropy(hidden, weight, ids, bias=bias)
    assert_close(log_prob, torch.zeros(11), atol=1e-12)
    assert_close(entropy, torch.zeros(11), atol=1e-12)
    log_prob, _ = implementation.log_prob_and_entropy(hidden, weight, ids - 1, bias=bias)
    assert_close(log_prob, torch.full((11,), -torch.inf))


@every_implementation()
def test_equal_tokens_have_the_entropy_of_their_number(implementation: Implementation) -> None:
    hidden, weight, _, targets = inputs()
    answers = implementation.log_prob_and_entropy(hidden, torch.zeros_like(weight), targets)
    assert_close(answers.entropy, np.full(11, np.log(37)), rtol=1e-12)
    assert_close(answers.log_prob, np.full(11, -np.log(37)), rtol=1e-12)


@pytest.mark.parametrize("asked", ["log_prob", "entropy"])
@every_implementation()
def test_each_answer_alone_has_its_gradient(implementation: Implementation, asked: str) -> None:
    case = inputs()
    leaves = [t.detach().clone().requires_grad_() for t in case[:3]]
    answers = implementation.log_prob_and_entropy(
        leaves[0], leaves[1], case.targets, bias=leaves[2]
    )
    getattr(answers, asked).sum().backward()
    logits, ids = head_logits(*case[:2], bias=case.bias), case.targets.numpy()
    on, off = np.ones(11), np.zeros(11)
    a, b = (on, off) if asked == "log_prob" else (off, on)
    expected = _backward(a, b, logits, ids, case, {})
    for leaf, true in zip(leaves, expected, strict=True):
        assert_close(leaf.grad, true, rtol=1e-9, atol=1e-12)


@every_implementation(needs={"transforms"})
def test_second_derivatives_of_both(implementation: Implementation) -> None:
    hidden, weight, bias, targets = inputs(3, vocab=6, dim=2)

    def both(*tensors: Tensor) -> Tensor:
        answers = implementation.log_prob_and_entropy(
            tensors[0], tensors[1], targets, bias=tensors[2]
        )
        return answers.log_prob + 0.3 * answers.entropy

    leaves = tuple(t.clone().requires_grad_() for t in (hidden, weight, bias))
    assert torch.autograd.gradcheck(both, leaves)
    assert torch.autograd.gradgradcheck(both, leaves)
