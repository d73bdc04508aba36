"""What `query` promises beyond random problems: ties and near ties, NaN, masks, certainty."""

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from compare import assert_close
from contract.cases import inputs
from torch import Tensor

import lmhead
from lmhead import reference

NAMES = ("log_prob", "rank", "entropy", "logsumexp", "argmax", "top_k", "kl")
# None: one tile. 512 bytes: tiles of a few tokens.
TILES = pytest.mark.parametrize("max_bytes", [None, 512], ids=["one tile", "many tiles"])


def ask(hidden: Tensor, weight: Tensor, **questions: Any) -> Any:
    """`query`, whose answers are known to be there by what was asked."""
    return lmhead.query(hidden, weight, **questions)


def of_logits(*rows: list[float], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """hidden and weight whose logits are exactly these rows."""
    logits = torch.tensor(rows, dtype=dtype)
    return torch.eye(len(rows), dtype=dtype), logits.T.contiguous()


def test_what_is_not_asked_is_none() -> None:
    hidden, weight, _, targets = inputs()
    for name in NAMES:
        asked = {
            "log_prob": targets,
            "rank": targets,
            "top_k": 3,
            "kl": (hidden, weight),
        }.get(name, True)
        answers = ask(hidden, weight, **{"kl_to" if name == "kl" else name: asked})
        assert [n for n in NAMES if getattr(answers, n) is not None] == [name]


@TILES
def test_all_questions_at_once(max_bytes: int | None) -> None:
    hidden, weight, bias, targets = inputs(3, 4)
    other, other_weight, _, _ = inputs(3, 4, seed=1, dim=7)
    answers = ask(
        hidden,
        weight,
        bias=bias,
        log_prob=targets,
        rank=targets,
        entropy=True,
        logsumexp=True,
        argmax=True,
        top_k=5,
        kl_to=(other, other_weight),
        max_bytes=max_bytes,
    )
    z, q = oracle.head_logits(hidden, weight, bias=bias), oracle.head_logits(other, other_weight)
    ids = targets.numpy()
    assert_close(answers.log_prob, reference.log_prob(z, ids), rtol=1e-10)
    assert_close(answers.rank, reference.rank(z, ids))
    assert_close(answers.entropy, reference.entropy(z), rtol=1e-10)
    assert_close(answers.logsumexp, reference.logsumexp(z), rtol=1e-10)
    assert_close(answers.argmax, reference.argmax(z))
    assert_close(answers.top_k.values, reference.top_k(z, 5)[0], rtol=1e-10)
    assert_close(answers.top_k.indices, reference.top_k(z, 5)[1])
    assert_close(answers.kl, reference.kl(z, q), rtol=1e-10)


@TILES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_ties_go_to_the_lowest_id(dtype: torch.dtype, max_bytes: int | None) -> None:
    """Equal tokens are in the order of their ids, also across tiles."""
    row = [0.0] * 300
    for at in (290, 7, 150, 151):
        row[at] = 2.0
    hidden, weight = of_logits(row, [1.0] * 300, dtype=dtype)
    ids = torch.tensor([[7, 150, 290, 0, 299], [0, 1, 150, 298, 299]])
    answers = ask(hidden, weight, argmax=True, top_k=6, rank=ids, max_bytes=max_bytes)
    assert_close(answers.argmax, torch.tensor([7, 0]))
    assert_close(
        answers.top_k.indices, torch.tensor([[7, 150, 151, 290, 0, 1], [0, 1, 2, 3, 4, 5]])
    )
    assert_close(answers.rank, torch.tensor([[0, 1, 3, 4, 299], [0, 1, 150, 298, 299]]))


@TILES
def test_near_ties_are_decided_in_float64(max_bytes: int | None) -> None:
    """1 and 1 + 2^-30 are one number in float32; the order is that of the true logits."""
    vocab = 200
    hidden = torch.tensor([[1.0, 2.0**-30]])
    weight = torch.ones(vocab, 2)
    weight[:, 1] = 0.0
    weight[180, 1], weight[3, 1], weight[77, 1] = 3.0, 2.0, 1.0
    ids = torch.tensor([[180, 3, 77, 0, 199]])
    answers = ask(hidden, weight, argmax=True, top_k=5, rank=ids, max_bytes=max_bytes)
    assert_close(answers.argmax, torch.tensor([180]))
    assert_close(answers.top_k.indices, torch.tensor([[180, 3, 77, 0, 1]]))
    assert_close(answers.rank, torch.tensor([[0, 1, 2, 3, 199]]))


@TILES
def test_near_ties_through_a_softcap(max_bytes: int | None) -> None:
    hidden, weight = of_logits([*np.linspace(20.0, 20.00002, 40).tolist(), 0.0])
    answers = ask(hidden, weight, softcap=10.0, argmax=True, top_k=41, max_bytes=max_bytes)
    z = oracle.head_logits(hidden, weight, softcap=10.0)
    assert_close(answers.argmax, reference.argmax(z))
    assert_close(answers.top_k.indices, reference.top_k(z, 41)[1])


@TILES
def test_the_order_does_not_depend_on_the_batch(max_bytes: int | None) -> None:
    """Many near ties: a row alone and the same row in a batch agree on all 500 places."""
    hidden, weight, _, _ = inputs(9, vocab=500, dim=64, dtype=torch.float32)
    weight = 1.0 + 1e-6 * weight
    batch = ask(hidden, weight, top_k=500, max_bytes=max_bytes).top_k
    truth = reference.top_k(oracle.head_logits(hidden, weight), 500)[1]
    assert_close(batch.indices, truth)
    for n, row in enumerate(hidden):
        alone = ask(row, weight, top_k=500).top_k
        assert_close(alone.indices, truth[n])


@TILES
def test_a_row_with_nan(max_bytes: int | None) -> None:
    """NaN propagates to that row's answers, chooses no token, and leaves the others alone."""
    hidden, weight, bias, targets = inputs()
    poisoned = hidden.clone()
    poisoned[5, 0] = torch.nan
    options = {
        "bias": bias,
        "log_prob": targets,
        "entropy": True,
        "logsumexp": True,
        "argmax": True,
        "top_k": 3,
        "max_bytes": max_bytes,
    }
    answers, clean = (ask(h, weight, **options) for h in (poisoned, hidden))
    others = torch.arange(11) != 5
    for name in ("log_prob", "entropy", "logsumexp"):
        found, expected = getattr(answers, name), getattr(clean, name)
        assert found[5].isnan()
        assert_close(found[others], expected[others], rtol=1e-12)
    assert_close(answers.argmax[5], -1)
    assert answers.top_k.values[5].isnan().all()
    assert_close(answers.top_k.indices[5], torch.tensor([-1, -1, -1]))
    assert_close(answers.argmax[others], clean.argmax[others])
    assert_close(answers.top_k.indices[others], clean.top_k.indices[others])


@TILES
def test_one_nan_token_spoils_the_order(max_bytes: int | None) -> None:
    hidden, weight, bias, _ = inputs(vocab=200)
    bias[150] = torch.nan
    ids = torch.arange(11)
    answers = ask(hidden, weight, bias=bias, argmax=True, top_k=2, rank=ids, max_bytes=max_bytes)
    z = oracle.head_logits(hidden, weight, bias=bias)
    assert_close(answers.argmax, torch.full((11,), -1))
    assert_close(answers.top_k.indices, reference.top_k(z, 2)[1])
    assert_close(answers.rank, reference.rank(z, ids.numpy()))


@TILES
def test_masked_tokens(max_bytes: int | None) -> None:
    """log_prob -inf, ranked last in the order of their ids, and still there in a full top-k."""
    hidden, weight, bias, _ = inputs(vocab=60)
    bias[10:50] = -torch.inf
    ids = torch.tensor([10, 49, 30]).expand(11, 3)
    answers = ask(hidden, weight, bias=bias, log_prob=ids, rank=ids, top_k=60, max_bytes=max_bytes)
    assert_close(answers.log_prob, torch.full((11, 3), -torch.inf))
    assert_close(answers.rank, torch.tensor([20, 59, 40]).expand(11, 3))
    assert_close(answers.top_k.indices[:, 20:], torch.arange(10, 50).expand(11, 40))
    assert_close(answers.top_k.values[:, 20:], torch.full((11, 40), -torch.inf))


@TILES
def test_kl_to_a_head_that_forbids_tokens(max_bytes: int | None) -> None:
    """Infinite where p allows what q forbids, finite where p forbids what q allows."""
    hidden, weight, bias, _ = inputs()
    masked = bias.clone()
    masked[20] = -torch.inf
    head = lmhead.LMHead(5, 37, bias=True, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(weight)
        assert head.bias is not None
        head.bias.copy_(masked)
    forbidding = ask(hidden, weight, bias=bias, kl_to=head(hidden), max_bytes=max_bytes)
    assert_close(forbidding.kl, torch.full((11,), torch.inf))
    allowing = ask(hidden, weight, bias=masked, kl_to=(hidden, weight), max_bytes=max_bytes)
    z, q = oracle.head_logits(hidden, weight, bias=masked), oracle.head_logits(hidden, weight)
    assert_close(allowing.kl, reference.kl(z, q), rtol=1e-9, atol=1e-12)
    both = ask(hidden, weight, bias=masked, kl_to=head(hidden), max_bytes=max_bytes)
    assert_close(both.kl, torch.zeros(11), atol=1e-12)


def test_kl_to_itself_is_zero_and_never_negative() -> None:
    hidden, weight, _, _ = inputs(dtype=torch.float32)
    same = ask(hidden, weight, kl_to=(hidden, weight)).kl
    assert_close(same, torch.zeros(11), atol=1e-6)


def test_a_saturated_row_is_certain() -> None:
    """Logits 1000 apart: entropy 0, log-probability 0 and -1000, no NaN in any gradient."""
    hidden, weight = of_logits([1000.0, 0.0, -1000.0])
    hidden.requires_grad_()
    ids = torch.tensor([[0, 1, 2]])
    answers = ask(hidden, weight, log_prob=ids, entropy=True, logsumexp=True)
    assert_close(answers.log_prob, torch.tensor([[0.0, -1000.0, -2000.0]]))
    assert_close(answers.entropy, torch.zeros(1))
    assert_close(answers.logsumexp, torch.full((1,), 1000.0))
    (answers.log_prob.sum() + answers.entropy.sum()).backward()
    assert_close(hidden.grad, torch.tensor([[-3000.0]]), atol=1e-2)


@TILES
def test_small_losses_of_confident_rows_are_not_rounded_away(max_bytes: int | None) -> None:
    """log p = -4.5e-5 beside logits of 1000: lse - z in float32 would say 0 or 6e-5."""
    hidden, weight = of_logits([1000.0, 990.0, *[-1000.0] * 90])
    answers = ask(hidden, weight, log_prob=torch.tensor([0]), entropy=True, max_bytes=max_bytes)
    z = oracle.head_logits(hidden, weight)
    assert_close(answers.log_prob, reference.log_prob(z, np.array([0])), atol=1e-7)
    assert_close(answers.entropy, reference.entropy(z), atol=1e-6)


@TILES
def test_no_rows(max_bytes: int | None) -> None:
    hidden, weight, bias, targets = inputs(0, 3)
    ids = torch.zeros(0, 3, 4, dtype=torch.int64)
    answers = ask(
        hidden,
        weight,
        bias=bias,
        log_prob=ids,
        rank=targets,
        entropy=True,
        argmax=True,
        top_k=2,
        max_bytes=max_bytes,
    )
    assert_close(answers.log_prob, torch.empty(0, 3, 4))
    for answer in (answers.rank, answers.entropy, answers.argmax):
        assert_close(answer, torch.empty(0, 3))
    assert_close(answers.top_k.indices, torch.empty(0, 3, 2))


def test_the_same_id_asked_twice_gets_both_gradients() -> None:
    hidden, weight, _, targets = inputs()
    leaf = hidden.clone().requires_grad_()
    twice = targets[:, None].expand(11, 2)
    log_prob = ask(leaf, weight, log_prob=twice).log_prob
    (log_prob * torch.tensor([1.0, 3.0], dtype=torch.float64)).sum().backward()
    once = hidden.clone().requires_grad_()
    log_prob = ask(once, weight, log_prob=targets).log_prob
    (4.0 * log_prob).sum().backward()
    assert once.grad is not None
    assert_close(leaf.grad, once.grad, rtol=1e-10, atol=1e-12)


def test_strides_do_not_matter() -> None:
    hidden, weight, bias, targets = inputs(22, vocab=74, dim=10)
    targets = targets.remainder(37)
    strided = (hidden[::2, ::2], weight[::2, 1::2], bias[::2], targets[::2])
    dense = tuple(t.contiguous() for t in strided)
    found, expected = (
        ask(h, w, bias=b, log_prob=t, rank=t, entropy=True, top_k=4)
        for h, w, b, t in (strided, dense)
    )
    assert_close(found.log_prob, expected.log_prob, rtol=1e-12)
    assert_close(found.entropy, expected.entropy, rtol=1e-12)
    assert_close(found.rank, expected.rank)
    assert_close(found.top_k.indices, expected.top_k.indices)
