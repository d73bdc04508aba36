"""`lmhead.divergence` against the float64 reference: every kind, every option, both gradients."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close, float64
from torch import Tensor
from torch_watch import no_tensor_of

import lmhead
from lmhead import reference
from lmhead.sweep import Pointwise, divergence_terms, kernels, linear_scores

KINDS = ("kl", "reverse_kl", "jsd", "tvd")
CASES = 1000


class Case:
    """A random problem: two heads of one vocabulary, their options, and how it is asked."""

    def __init__(self, seed: int) -> None:
        random = self.random = np.random.default_rng(seed)
        self.dtype = [torch.float64, torch.float32, torch.float32, torch.bfloat16][seed % 4]
        self.kind = KINDS[int(random.integers(4))]
        self.beta = float(random.uniform(0.05, 0.95))
        self.temperature = float(random.choice([1.0, 0.6, 2.5]))
        lead = [(1,), (7,), (3, 5), (20,), (0,)][int(random.integers(5))]
        self.vocab = int(random.choice([1, 2, 33, 80]))
        self.lead = lead
        self.p, self.q = (self._side(int(random.choice([1, 4, 13]))) for _ in range(2))
        self.top_k = int(random.integers(1, self.vocab + 1)) if random.random() < 0.3 else None
        self.mask = None
        if random.random() < 0.4:
            self.mask = torch.from_numpy(random.random(lead) < 0.6)
        self.lazy = bool(random.random() < 0.6)
        self.max_bytes = [None, 4096, 600][int(random.integers(3))]
        self.even = bool(random.random() < 0.5)
        self.frozen_p = bool(random.random() < 0.5)

    def _side(self, width: int) -> dict[str, Any]:
        def normal(*shape: int) -> Tensor:
            return torch.from_numpy(self.random.standard_normal(shape)).to(self.dtype)

        spread = float(self.random.choice([0.3, 1.0, 4.0]))
        side: dict[str, Any] = {
            "hidden": normal(*self.lead, width) * spread,
            "weight": normal(self.vocab, width),
        }
        if self.random.random() < 0.3:
            side["bias"] = normal(self.vocab)
        if self.random.random() < 0.2:
            side["softcap"] = 3.0
        return side

    def logits(self, side: dict[str, Any]) -> Array:
        given: Any = {k: float64(v) if isinstance(v, Tensor) else v for k, v in side.items()}
        hidden, weight = given.pop("hidden"), given.pop("weight")
        return np.asarray(reference.head_logits(hidden, weight, **given)) / self.temperature

    def given(self, side: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
        """The side as `divergence` takes it: lazy logits, or a pair where a pair says it all."""
        if not self.lazy and "bias" not in side and "softcap" not in side:
            return tensors["hidden"], tensors["weight"]
        width = side["weight"].shape[1]
        bias = "bias" in side
        head = lmhead.LMHead(
            width, self.vocab, bias=bias, softcap=side.get("softcap"), dtype=self.dtype
        )
        parameters = {k: v for k, v in tensors.items() if k != "hidden"}
        logits = torch.func.functional_call(head, parameters, (tensors["hidden"],))
        logits.max_bytes = self.max_bytes
        return logits


def leaves(side: dict[str, Any], *, grad: bool) -> dict[str, Tensor]:
    names = [k for k in ("hidden", "weight", "bias") if k in side]
    return {k: side[k].detach().clone().requires_grad_(grad) for k in names}


def dense(side: dict[str, Any], tensors: dict[str, Tensor], temperature: float) -> Tensor:
    z = tensors["hidden"] @ tensors["weight"].T + tensors.get("bias", 0.0)
    cap = side.get("softcap")
    return (z if cap is None else cap * torch.tanh(z / cap)) / temperature


def check(case: Case) -> None:
    mine = [leaves(case.p, grad=not case.frozen_p), leaves(case.q, grad=True)]
    p, q = (case.given(s, t) for s, t in zip((case.p, case.q), mine, strict=True))
    options: Any = {"kind": case.kind, "beta": case.beta, "temperature": case.temperature}
    found = lmhead.divergence(p, q, top_k=case.top_k, mask=case.mask, **options)
    z_p, z_q = case.logits(case.p), case.logits(case.q)
    n = math.prod(case.lead)
    up = np.full(n, 0.7) if case.even else case.random.uniform(0.1, 1.0, n)
    on = np.ones(n) if case.mask is None else case.mask.numpy().reshape(n).astype(float)
    flat_p, flat_q = z_p.reshape(n, case.vocab), z_q.reshape(n, case.vocab)
    if case.top_k is None:
        true = reference.divergence(flat_p, flat_q, case.kind, case.beta)
    else:
        merged = reference.merge_tail(flat_p, flat_q, case.top_k)
        if case.top_k == case.vocab:
            merged = (merged[0][..., :-1], merged[1][..., :-1])
        true = reference.divergence(*merged, case.kind, case.beta)
    scale = max(1.0, np.abs(flat_p).max(initial=0.0), np.abs(flat_q).max(initial=0.0))
    tolerance = (1e-11 if case.dtype == torch.float64 else 4e-6) * scale
    assert_close(found, (true * on).reshape(case.lead), atol=tolerance, rtol=tolerance)
    if n == 0:
        return
    torch.autograd.backward(found, torch.from_numpy(up.reshape(case.lead)).to(found.dtype))
    # Plain float64 autograd takes the gradient of the logits on to the tensors.
    if case.top_k is None:
        grads = reference.divergence_backward(up * on, flat_p, flat_q, case.kind, case.beta)
    else:
        grads = truncated_gradients(case, flat_p, flat_q, up * on)
    for side, tensors, grad in zip((case.p, case.q), mine, grads, strict=True):
        exact = {k: v.detach().double().requires_grad_() for k, v in tensors.items()}
        z = dense(side, exact, case.temperature).reshape(n, case.vocab)
        torch.autograd.backward(z, torch.from_numpy(np.asarray(grad)))
        for name, leaf in tensors.items():
            if not leaf.requires_grad:
                assert leaf.grad is None
                continue
            given: Any = exact[name].grad
            true_grad = float64(given)
            size = max(1.0, np.abs(true_grad).max(initial=0.0))
            loose = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 8e-3}[case.dtype]
            assert_close(leaf.grad, true_grad, atol=loose * size * scale, what=name)


def truncated_gradients(case: Case, z_p: Array, z_q: Array, up: Array) -> tuple[Array, Array]:
    """Gradients of the merged distributions, from float64 autograd of their definition."""
    assert case.top_k is not None
    ids = torch.from_numpy(reference.descending_order(z_p)[..., : case.top_k].copy())
    p, q = (torch.from_numpy(z.copy()).requires_grad_() for z in (z_p, z_q))

    def merged(z: Tensor) -> Tensor:
        probs = z.softmax(-1)
        kept = probs.gather(-1, ids)
        if case.top_k == case.vocab:
            return kept
        outside = torch.ones_like(probs).scatter(-1, ids, 0.0)
        return torch.cat([kept, (probs * outside).sum(-1, keepdim=True)], -1)

    a, b = merged(p), merged(q)
    if case.kind == "kl":
        value = (a * (a.log() - b.log())).sum(-1)
    elif case.kind == "reverse_kl":
        value = (b * (b.log() - a.log())).sum(-1)
    elif case.kind == "tvd":
        value = (a - b).abs().sum(-1) / 2
    else:
        m = case.beta * a + (1 - case.beta) * b
        value = case.beta * (a * (a / m).log()).sum(-1)
        value = value + (1 - case.beta) * (b * (b / m).log()).sum(-1)
    grads = torch.autograd.grad(value, (p, q), torch.from_numpy(up))
    return grads[0].numpy(), grads[1].numpy()


@pytest.mark.parametrize("block", range(10))
def test_a_thousand_random_cases(block: int) -> None:
    size = CASES // 10
    for seed in range(block * size, (block + 1) * size):
        case = Case(seed)
        try:
            check(case)
        except AssertionError as error:
            facts = {k: v for k, v in vars(case).items() if k not in ("p", "q", "random", "mask")}
            raise AssertionError(f"case {seed}: {facts}: {error}") from error


def heads(
    rows: int = 12, vocab: int = 60, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    sizes = ((rows, 8), (vocab, 8), (rows, 5), (vocab, 5))
    h_p, w_p, h_q, w_q = (torch.randn(s, dtype=dtype) for s in sizes)
    return h_p, w_p, h_q, w_q


@pytest.mark.parametrize("kind", KINDS)
def test_no_logits_are_built(kind: str) -> None:
    """Neither forward nor backward, for even and uneven gradients."""
    h_p, w_p, h_q, w_q = heads(300, 2000, torch.float32)
    h_q.requires_grad_(), w_q.requires_grad_()
    with no_tensor_of(300, 2000):
        value = lmhead.divergence((h_p, w_p), (h_q, w_q), kind=kind)
        value.mean().backward()  # type: ignore[no-untyped-call]
        value = lmhead.divergence((h_p, w_p), (h_q, w_q), kind=kind)
        (value * torch.linspace(0, 1, 300)).sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_have_probability_zero(kind: str) -> None:
    """-inf in both, or in one: no NaN, and the value and gradients of the reference."""
    h_p, w_p, h_q, w_q = heads(20)
    sides = []
    for hidden, weight, masked in ((h_p, w_p, [3, 4]), (h_q, w_q, [4, 5])):
        head = lmhead.LMHead(weight.shape[1], 60, bias=True, dtype=torch.float64)
        head.weight.data = weight
        assert head.bias is not None
        head.bias.data.zero_()[masked] = -math.inf
        sides.append((head, hidden))
    (a, x), (b, y) = sides
    value = lmhead.divergence(a(x), b(y), kind=kind)
    z_p, z_q = ((h @ w.T).numpy() for h, w in ((h_p, w_p), (h_q, w_q)))
    z_p[:, [3, 4]] = z_q[:, [4, 5]] = -np.inf
    with np.errstate(invalid="ignore"):
        true = reference.divergence(z_p, z_q, kind)
    assert_close(value, true, rtol=1e-10, atol=1e-12)
    if kind in ("kl", "reverse_kl"):
        assert bool(value.isinf().all())
        return
    value.sum().backward()  # type: ignore[no-untyped-call]
    grad_p, grad_q = reference.divergence_backward(np.ones(20), z_p, z_q, kind)
    for head, hidden, grad in ((a, x, grad_p), (b, y, grad_q)):
        assert_close(head.weight.grad, grad.T @ hidden.numpy(), rtol=1e-9, atol=1e-11)


def test_a_side_without_gradient_costs_none() -> None:
    """No gradient product is made for the teacher."""
    from torch_watch import Products

    h_p, w_p, h_q, w_q = heads(64, 500, torch.float32)
    one = 2 * 64 * 500  # of width 1
    h_q.requires_grad_(), w_q.requires_grad_()
    with Products() as products:
        lmhead.divergence((h_p, w_p), (h_q, w_q), kind="jsd").mean().backward()  # type: ignore[no-untyped-call]
    assert products.flops == one * (8 + 3 * 5)


@pytest.mark.parametrize("kind", ["kl", "jsd"])
def test_unequal_rows_beyond_memory(kind: str) -> None:
    """dD/dz of all rows does not fit: only the gradient of the weight is made again."""
    from torch_watch import Products

    h_p, w_p, h_q, w_q = heads(256, 500, torch.float32)
    h_q.requires_grad_(), w_q.requires_grad_()
    # Beside the scratch memory, of the size of the cache: the logits of 80 rows, not dD/dz of 256.
    max_bytes = 4 * (divergence_terms._SCRATCH * kernels.BLOCK + 80 * 1084)
    rows = torch.rand(256, generator=torch.Generator().manual_seed(0))
    p, q = (
        linear_scores(h, w, None, Pointwise(), max_bytes=max_bytes)
        for h, w in ((h_p, w_p), (h_q, w_q))
    )
    with Products() as products:
        values = p.divergence(q, kind)
        (values * rows).sum().backward()  # type: ignore[no-untyped-call]
    one = 2 * 256 * 500  # of width 1
    assert products.flops == one * (8 + 3 * 5 + 8 + 2 * 5)
    z_p, z_q = h_p.double() @ w_p.double().T, h_q.detach().double() @ w_q.detach().double().T
    dz = reference.divergence_backward(rows.double().numpy(), z_p.numpy(), z_q.numpy(), kind)[1]
    assert_close(h_q.grad, dz @ w_q.detach().double().numpy(), rtol=1e-4, atol=1e-5)
    assert_close(w_q.grad, dz.T @ h_q.detach().double().numpy(), rtol=1e-4, atol=1e-5)


def test_second_derivatives() -> None:
    h_p, w_p, h_q, w_q = heads(4, 9)
    h_q.requires_grad_()
    for kind in ("kl", "reverse_kl", "jsd"):
        assert torch.autograd.gradgradcheck(
            lambda h, kind=kind: lmhead.divergence((h_p, w_p), (h, w_q), kind=kind), (h_q,)
        )


def test_recorded_logits() -> None:
    """Logits with arithmetic on them, which no sweep knows, go a few rows at a time."""
    h_p, w_p, h_q, w_q = heads()
    head = lmhead.LMHead(8, 60, dtype=torch.float64)
    head.weight.data = w_p
    value = lmhead.divergence(head(h_p).sinh(), (h_q, w_q), kind="jsd")
    true = reference.divergence((h_p @ w_p.T).sinh().numpy(), (h_q @ w_q.T).numpy(), "jsd")
    assert_close(value, true, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "js"}, "kind must be one of"),
        ({"beta": 0.0}, "beta must be above 0"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"top_k": 0}, "top_k must be in"),
        ({"top_k": 61}, "top_k must be in"),
        ({"mask": torch.ones(12)}, "mask must be bool of shape"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "mask must be bool of shape"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    h_p, w_p, h_q, w_q = heads()
    with pytest.raises(ValueError, match=message):
        lmhead.divergence((h_p, w_p), (h_q, w_q), **options)


def test_two_vocabularies_are_refused() -> None:
    h_p, w_p, h_q, w_q = heads()
    with pytest.raises(ValueError, match="q must have logits of the shape of p"):
        lmhead.divergence((h_p, w_p), (h_q, w_q[:59]))
    with pytest.raises(TypeError, match="p must be LazyLogits or a pair"):
        lmhead.divergence(h_p, (h_q, w_q))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["kl", "jsd"])
def test_float64_is_as_accurate_as_torch_for_large_logits(kind: str) -> None:
    random = np.random.default_rng(5)
    shapes = [(17, 40), (33, 40), (17, 6), (33, 6)]
    given = [random.standard_normal(shape) for shape in shapes]
    given[0] *= 5  # logits of about 100
    h, w, g, v = (x.astype(np.longdouble) for x in given)
    true = divergence_in_long_double(h @ w.T, g @ v.T, kind)
    a, b, c, d = map(torch.from_numpy, given)
    found = lmhead.divergence((a, b), (c, d), kind=kind)
    error = np.abs(found.numpy() - true).max()
    assert error < 2e-14, float(error)


def divergence_in_long_double(z_p: Any, z_q: Any, kind: str) -> Any:
    def log_softmax(z: Any) -> Any:
        z = z - z.max(1, keepdims=True)
        return z - np.log(np.exp(z).sum(1, keepdims=True))

    def kl(a: Any, b: Any) -> Any:
        return (np.exp(a) * (a - b)).sum(1)

    p, q = log_softmax(z_p), log_softmax(z_q)
    m = np.logaddexp(p, q) - np.log(np.longdouble(2))
    return kl(p, q) if kind == "kl" else (kl(p, m) + kl(q, m)) / 2


@pytest.mark.parametrize("max_bytes", [None, 2**15])
def test_row_weights_cost_no_second_sweep(
    monkeypatch: pytest.MonkeyPatch, max_bytes: int | None
) -> None:
    """The gradient of the logits is kept for the backward pass, if it fits into `max_bytes`."""
    sweeps: list[int] = []
    run = divergence_terms._Sweep.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        sweeps.append(1)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(divergence_terms._Sweep, "run", counted)
    teacher, student = lmhead.LMHead(6, 300), lmhead.LMHead(5, 300)
    teacher.requires_grad_(False)
    teacher.max_bytes = student.max_bytes = max_bytes
    hidden = torch.randn(40, 5, requires_grad=True)
    p, q = teacher(torch.randn(40, 6)), student(hidden)
    (lmhead.divergence(p, q, kind="jsd") @ torch.rand(40)).backward()  # type: ignore[no-untyped-call]
    assert len(sweeps) == (1 if max_bytes is None else 2)
