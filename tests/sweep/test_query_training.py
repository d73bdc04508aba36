"""The questions of `query` that post-training asks: temperature, log Σ p², mean logit, top-1."""

import itertools
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch_watch
from compare import Array, assert_close, float64
from contract.cases import inputs
from torch import Tensor

import lmhead
from lmhead import reference

TILES = pytest.mark.parametrize("max_bytes", [None, 512], ids=["one tile", "many tiles"])
HEADS: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"bias": True, "mask": True},
    {"softcap": 4.0, "scale": 0.7},
    {"softcap": 4.0, "bias": True, "mask": True},
]


def head_of(options: dict[str, Any], bias: Tensor) -> dict[str, Any]:
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = bias.clone()
    if options.pop("mask", False):
        options["bias"][[0, 5, 36]] = -torch.inf
    return options


def logits_of(hidden: Tensor, weight: Tensor, head: dict[str, Any], temperature: Any) -> Array:
    by = temperature[..., None].numpy() if isinstance(temperature, Tensor) else temperature
    z: Array = oracle.head_logits(hidden, weight, **head) / by
    return z


@TILES
@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("temperature", ["one", "per row"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_answers_and_gradients(
    dtype: torch.dtype, temperature: str, options: dict[str, Any], max_bytes: int | None
) -> None:
    """All new answers at once, and the gradient of a random combination of them."""
    hidden, weight, bias, targets = inputs(3, 7, dtype=dtype)
    head = head_of(options, bias)
    targets = targets.clamp(6, 35)  # not masked
    t: Any = 0.7
    if temperature == "per row":
        t = torch.linspace(0.3, 2.5, 21, dtype=torch.float64).reshape(3, 7)
    leaves = {"hidden": hidden, "weight": weight}
    leaves |= {"bias": head["bias"]} if "bias" in head else {}
    for leaf in leaves.values():
        leaf.requires_grad_()
    given = t.to(dtype) if isinstance(t, Tensor) else t
    answers = lmhead.query(
        hidden,
        weight,
        **head,
        temperature=given,
        log_prob=targets,
        entropy=True,
        log_sum_sq=True,
        mean_logit=True,
        top1_match=targets,
        argmax=True,
        max_bytes=max_bytes,
    )
    t = given.double() if isinstance(given, Tensor) else given
    z = logits_of(
        hidden, weight, {k: v.detach() if isinstance(v, Tensor) else v for k, v in head.items()}, t
    )
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    expected = {
        "log_prob": reference.log_prob(z, targets.numpy()),
        "entropy": reference.entropy(z),
        "log_sum_sq": reference.log_sum_sq(z),
        "mean_logit": reference.mean_logit(z),
    }
    for name, value in expected.items():
        assert_close(getattr(answers, name), value, rtol=rtol, atol=10 * rtol, what=name)
    assert_close(answers.argmax, reference.argmax(z))
    assert_close(answers.top1_match, reference.argmax(z) == targets.numpy(), dtype=torch.bool)

    random = torch.Generator().manual_seed(3)
    names = ("log_prob", "entropy", "log_sum_sq", "mean_logit")
    up = {name: torch.randn(3, 7, generator=random, dtype=torch.float64) for name in names}
    sum((getattr(answers, name) * up[name].to(dtype)).sum() for name in names).backward()
    grad_z = (
        reference.log_prob_backward(float64(up["log_prob"]), z, targets.numpy())
        + reference.entropy_backward(float64(up["entropy"]), z)
        + reference.log_sum_sq_backward(float64(up["log_sum_sq"]), z)
        + reference.mean_logit_backward(float64(up["mean_logit"]), z)
    )
    by = t[..., None].numpy() if isinstance(t, Tensor) else t
    plain = {k: v.detach() if isinstance(v, Tensor) else v for k, v in head.items()}
    true = oracle.head_logits_backward(grad_z / by, hidden.detach(), weight.detach(), **plain)
    for name, leaf in leaves.items():
        found = leaf.grad
        if name == "bias":  # the gradient of a masked token's bias is of no use
            allowed = head["bias"].detach().isfinite()
            assert found is not None
            assert_close(found[allowed], true.bias[allowed.numpy()], rtol=10 * rtol, atol=30 * rtol)
        else:
            what = f"gradient of {name}"
            assert_close(found, getattr(true, name), rtol=10 * rtol, atol=30 * rtol, what=what)


def test_a_temperature_per_row_leaves_decisions_exact() -> None:
    """Near ties that float32 cannot tell apart, at every temperature."""
    hidden = torch.tensor([[1.0, 2.0**-30]]).repeat(12, 1)
    weight = torch.ones(200, 2)
    weight[:, 1] = 0.0
    weight[180, 1], weight[3, 1] = 3.0, 2.0
    temperature = torch.linspace(0.1, 9.0, 12)
    ids = torch.tensor([180]).expand(12)
    answers = lmhead.query(
        hidden, weight, temperature=temperature, argmax=True, top1_match=ids, rank=ids - 177
    )
    assert_close(answers.argmax, ids)
    assert bool(answers.top1_match.all())
    assert_close(answers.rank, torch.ones(12))


def test_temperature_of_half_precision_is_not_rounded() -> None:
    """bfloat16 hidden states divided by 3 would lose 8 bits."""
    hidden, weight, _, targets = inputs(20, dtype=torch.bfloat16)
    t = torch.full((20,), 3.0)
    z = oracle.head_logits(hidden, weight) / 3.0
    answers = lmhead.query(hidden, weight, temperature=t, log_prob=targets)
    assert_close(answers.log_prob, reference.log_prob(z, targets.numpy()), rtol=1e-6, atol=1e-6)


def test_several_sets_of_targets() -> None:
    hidden, weight, _, a = inputs(4, 3)
    b = (a[..., None] + torch.arange(5)) % 37
    answers = lmhead.query(hidden, weight, log_prob=[a, b], rank=(b, a), top1_match=[a])
    for ids, log_prob, rank in zip((a, b), answers.log_prob, reversed(answers.rank), strict=True):
        alone = lmhead.query(hidden, weight, log_prob=ids, rank=ids)
        assert_close(log_prob, alone.log_prob)
        assert_close(rank, alone.rank)
    assert_close(answers.top1_match[0], answers.rank[1] == 0)


def test_kl_at_a_temperature() -> None:
    """Applies to both distributions, whatever q is given as."""
    hidden, weight, _, _ = inputs(6)
    other, other_weight, _, _ = inputs(6, dim=3, seed=4)
    head = lmhead.LMHead(3, 37, dtype=torch.float64)
    head.weight.data = other_weight
    per_row = torch.linspace(0.5, 2.0, 6, dtype=torch.float64)
    temperatures: list[Any] = [0.7, per_row]
    for t, q in itertools.product(temperatures, ("pair", "lazy")):
        kl_to: Any = (other, other_weight) if q == "pair" else head(other)
        found = lmhead.query(hidden, weight, temperature=t, kl_to=kl_to).kl
        z, y = logits_of(hidden, weight, {}, t), logits_of(other, other_weight, {}, t)
        assert_close(found, reference.kl(z, y), rtol=1e-9, atol=1e-12, what=f"kl {q}")


def test_lazy_logits_answer_them_too() -> None:
    hidden, weight, _, targets = inputs(8)
    head = lmhead.LMHead(5, 37, dtype=torch.float64)
    head.weight.data = weight
    z = oracle.head_logits(hidden, weight)
    for logits, by in ((head(hidden), 1.0), (head(hidden).exp().log() / 2.0, 2.0)):
        found = logits.ask(log_sum_sq=True, mean_logit=True, top1_match=targets)
        assert_close(found.log_sum_sq, reference.log_sum_sq(z / by), rtol=1e-9)
        assert_close(found.mean_logit, reference.mean_logit(z / by), rtol=1e-9)
        assert_close(found.top1_match, reference.argmax(z) == targets.numpy())


@pytest.mark.parametrize(
    "wrong", [0.0, -1.0, torch.zeros(11), torch.ones(3), torch.ones(11).long()]
)
def test_a_temperature_must_be_positive(wrong: Any) -> None:
    hidden, weight, _, _ = inputs()
    with pytest.raises(ValueError, match="temperature must be"):
        lmhead.query(hidden, weight, temperature=wrong, entropy=True)


def test_rows_of_weight_zero_are_left_out() -> None:
    """Answers times the weight; 0, -1 and False where it is 0; gradients of the other rows only."""
    hidden, weight, _, targets = inputs(3, 4)
    by = torch.tensor([[1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.5, 1.0], [0.0, 1.0, 0.0, 0.0]])
    asked: Any = {"log_prob": targets, "entropy": True, "rank": targets, "argmax": True}
    asked |= {"top1_match": targets, "top_k": 2}
    poisoned = torch.where(by[..., None] == 0, torch.nan, hidden).requires_grad_()
    found = lmhead.query(poisoned, weight, row_weight=by, **asked)
    plain = lmhead.query(hidden, weight, **asked)
    on = by != 0
    assert_close(found.log_prob, torch.where(on, plain.log_prob * by, 0.0), rtol=1e-12)
    assert_close(found.entropy, torch.where(on, plain.entropy * by, 0.0), rtol=1e-12)
    assert_close(found.rank, torch.where(on, plain.rank, -1))
    assert_close(found.argmax, torch.where(on, plain.argmax, -1))
    assert_close(found.top1_match, plain.top1_match & on)
    assert_close(found.top_k.values[on], plain.top_k.values[on], rtol=1e-12)
    found.log_prob.sum().backward()
    assert poisoned.grad is not None
    assert bool((poisoned.grad[~on] == 0).all())
    hidden.requires_grad_()
    (lmhead.query(hidden, weight, log_prob=targets).log_prob * by).sum().backward()
    assert_close(poisoned.grad, hidden.grad if hidden.grad is not None else torch.nan, rtol=1e-9)
    with pytest.raises(ValueError, match="row_weight must have shape"):
        lmhead.query(hidden, weight, entropy=True, row_weight=torch.ones(4))


def test_several_hidden_tensors_share_a_sweep() -> None:
    """Multi-token prediction: one weight, K sets of hidden states; the weight is read once."""
    _, weight, _, _ = inputs()
    sets = [inputs(6, seed=s).hidden for s in range(3)]
    targets = torch.stack([inputs(6, seed=s).targets for s in range(3)])
    found = lmhead.query(sets, weight, log_prob=targets, entropy=True, top_k=2)
    with torch.no_grad(), torch_watch.Products() as products:
        lmhead.query(sets, weight, log_prob=targets, entropy=True)
    assert products.flops == 2 * 18 * 37 * 5
    for answers, hidden, ids in zip(found, sets, targets, strict=True):
        alone = lmhead.query(hidden, weight, log_prob=ids, entropy=True, top_k=2)
        assert_close(answers.log_prob, alone.log_prob, rtol=1e-12)
        assert_close(answers.entropy, alone.entropy, rtol=1e-12)
        assert_close(answers.top_k.indices, alone.top_k.indices)


def test_several_heads() -> None:
    weights = [inputs(seed=s, vocab=v).weight for s, v in ((1, 37), (2, 50))]
    hidden, _, _, ids = inputs(6)
    found = lmhead.query([hidden, hidden * 2], weights, log_prob=torch.stack([ids, ids]))
    for answers, h, w in zip(found, (hidden, hidden * 2), weights, strict=True):
        assert_close(answers.log_prob, lmhead.query(h, w, log_prob=ids).log_prob)
    with pytest.raises(ValueError, match="weight must be one tensor or one for each"):
        lmhead.query([hidden], weights, entropy=True)


@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_log_prob_among_kept_tokens(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Normalised over the kept sets, with gradients, as dense float64 autograd has them."""
    hidden, weight, bias, _ = inputs(9, dtype=dtype)
    head = head_of(options, bias)
    random = torch.Generator().manual_seed(1)
    sets = [torch.randperm(30, generator=random)[: n + 1] + 6 for n in range(9)]
    token_ids = torch.cat(sets)
    offsets = torch.tensor([0, *(len(s) for s in sets)]).cumsum(0)
    ids = torch.stack([s[0] for s in sets])
    t = torch.linspace(0.5, 1.5, 9, dtype=dtype)
    leaves = [hidden, weight, *([head["bias"]] if "bias" in head else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    up = torch.linspace(-1.0, 1.0, 9, dtype=dtype)
    kept: Any = SimpleNamespace(token_ids=token_ids.tolist(), offsets=offsets.tolist())
    found = lmhead.query(hidden, weight, **head, temperature=t, log_prob=ids, kept=kept)
    grads = torch.autograd.grad(found.log_prob, leaves, up)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    z = exact[0] @ exact[1].T + (exact[2] if len(exact) == 3 else 0.0)
    z = z * head.get("scale", 1.0)
    if "softcap" in head:
        z = head["softcap"] * torch.tanh(z / head["softcap"])
    z = z / t.double()[:, None]
    true = torch.stack([z[i, s].log_softmax(0)[0] for i, s in enumerate(sets)])
    rtol = 1e-10 if dtype == torch.float64 else 2e-5
    assert_close(found.log_prob, true, rtol=rtol, atol=rtol)
    for ours, expected in zip(grads, torch.autograd.grad(true, exact, up.double()), strict=True):
        assert_close(ours, expected, rtol=10 * rtol, atol=10 * rtol)


def test_kept_sets_must_be_complete() -> None:
    hidden, weight, _, ids = inputs(3)
    good = (ids, torch.arange(4))
    assert_close(lmhead.query(hidden, weight, log_prob=ids, kept=good).log_prob, torch.zeros(3))
    with pytest.raises(ValueError, match="kept must hold every id"):
        lmhead.query(hidden, weight, log_prob=(ids + 1) % 37, kept=good)
    with pytest.raises(ValueError, match="kept offsets must rise from 0 to 3 in 4 entries"):
        lmhead.query(hidden, weight, log_prob=ids, kept=(ids, torch.arange(3)))
    with pytest.raises(ValueError, match="log_prob must be given with kept"):
        lmhead.query(hidden, weight, entropy=True, kept=good)
