"""What the loss and the queries cost: matrix products, and no tensor of tokens x vocabulary.

A reduced loss with both gradients costs three products in all: logits, gradient of hidden, gradient
of weight. A side that needs no gradient costs nothing.
"""

from typing import Any

import pytest
import torch
from lazy_and_dense import backward, ids
from torch import Tensor
from torch_watch import count_products, no_tensor_of

from lmhead import LMHead, linear_cross_entropy, query
from lmhead.sweep import run_sweep

N, D, V = 96, 48, 640
# Half of what the logits take: they must be made in pieces.
HALF = N * V * 4 // 2
TARGETS = ids(N, vocab=V)


def leaves(hidden_trained: bool = True, weight_trained: bool = True) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(N, D).requires_grad_(hidden_trained)
    return hidden, torch.randn(V, D).requires_grad_(weight_trained)


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smooth": {"label_smoothing": 0.1, "z_loss": 1e-4},
    "weighted": {"class_weight": torch.linspace(0.5, 2, V)},
    "softcap": {"softcap": 20.0, "scale": 0.5},
    "num_items": {"num_items": 77},
}


@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize(
    ("hidden_trained", "weight_trained", "products"),
    [(True, True, 3), (True, False, 2), (False, True, 2), (False, False, 1)],
    ids=["both", "hidden only", "weight only", "no gradient"],
)
def test_products_of_a_reduced_loss(
    options: str, hidden_trained: bool, weight_trained: bool, products: int
) -> None:
    hidden, weight = leaves(hidden_trained, weight_trained)

    def step() -> None:
        loss = linear_cross_entropy(hidden, weight, TARGETS, **LOSSES[options])
        if loss.requires_grad:
            backward(loss)

    assert count_products(step, N, D, V) <= 1.05 * products


def test_products_of_the_largest_vocabulary_in_use() -> None:
    tokens, size, vocab = 64, 4, 262_144
    hidden = torch.randn(tokens, size, requires_grad=True)
    weight = torch.randn(vocab, size, requires_grad=True)
    targets = ids(tokens, vocab=vocab)

    def step() -> None:
        backward(linear_cross_entropy(hidden, weight, targets))

    assert count_products(step, tokens, size, vocab) <= 3.15


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_little_memory_costs_one_more_product_at_most(reduction: Any) -> None:
    hidden, weight = leaves()

    def step() -> None:
        loss = linear_cross_entropy(hidden, weight, TARGETS, reduction=reduction, max_bytes=HALF)
        backward(loss.sum())

    assert count_products(step, N, D, V) <= 4.2


def test_products_without_grad_mode() -> None:
    hidden, weight = leaves()
    with torch.no_grad():
        assert (
            count_products(lambda: linear_cross_entropy(hidden, weight, TARGETS), N, D, V) <= 1.05
        )


def test_products_of_the_lazy_spelling() -> None:
    hidden, _ = leaves()
    head = LMHead(D, V)
    cross_entropy = torch.nn.functional.cross_entropy

    def step() -> None:
        backward(cross_entropy(head(hidden), TARGETS))

    assert count_products(step, N, D, V) <= 3.15


def test_all_questions_share_one_sweep() -> None:
    hidden, weight = leaves(False, False)
    questions: dict[str, Any] = {
        "log_prob": TARGETS,
        "rank": TARGETS,
        "entropy": True,
        "logsumexp": True,
        "argmax": True,
        "top_k": 5,
    }
    # The given ids' own logits may be computed apart: a product as thin as the ids.
    assert count_products(lambda: query(hidden, weight, **questions), N, D, V) <= 1.05


@pytest.mark.parametrize("probabilities", [False, True], ids=["ids", "probabilities"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_allocate_no_logits(
    probabilities: bool, reduction: Any, softcap: float | None, dtype: torch.dtype
) -> None:
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in leaves())
    targets = torch.rand(N, V).softmax(-1) if probabilities else TARGETS
    with no_tensor_of(N, V):
        loss = linear_cross_entropy(
            hidden,
            weight,
            targets,
            reduction=reduction,
            softcap=softcap,
            label_smoothing=0.1,
            max_bytes=HALF,
        )
        backward(loss.sum())


@pytest.mark.parametrize(
    "questions",
    [
        {"log_prob": TARGETS},
        {"log_prob": ids(N, 4, vocab=V)},
        {"rank": TARGETS},
        {"rank": ids(N, 4, vocab=V)},
        {"entropy": True},
        {"logsumexp": True},
        {"argmax": True},
        {"top_k": 7},
        {"kl_to": (torch.ones(N, 3), torch.ones(V, 3))},
        {"log_prob": TARGETS, "entropy": True, "logsumexp": True, "top_k": 3, "argmax": True},
    ],
    ids=lambda questions: "+".join(questions),
)
@pytest.mark.parametrize("trained", [False, True])
def test_queries_allocate_no_logits(questions: dict[str, Any], trained: bool) -> None:
    hidden, weight = leaves(trained, trained)
    with no_tensor_of(N, V):
        answers = query(hidden, weight, max_bytes=HALF, **questions)
        given = [answers.log_prob, answers.entropy, answers.logsumexp, answers.kl]
        smooth = [answer for answer in given if answer is not None]
        if trained and smooth:
            backward(sum(answer.sum() for answer in smooth))
            assert hidden.grad is not None
            assert weight.grad is not None


@pytest.mark.parametrize("options", [{"label_smoothing": 0.1}, {"grad_filter": 0.02}])
def test_gradients_are_handed_over_without_a_copy(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd copies a tensor into `.grad` where something else still holds it."""
    made: list[int] = []

    def watched(*args: Any) -> Any:
        value, gradients = answer_and_differentiate(*args)
        made.extend(g.data_ptr() for g in gradients if g is not None)
        return value, gradients

    answer_and_differentiate = run_sweep.answer_and_differentiate
    monkeypatch.setattr(run_sweep, "answer_and_differentiate", watched)
    hidden, weight = leaves()
    backward(linear_cross_entropy(hidden, weight, TARGETS, **options))
    assert hidden.grad is not None
    assert weight.grad is not None
    assert made == [hidden.grad.data_ptr(), weight.grad.data_ptr()]
