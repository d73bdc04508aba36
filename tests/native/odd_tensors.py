"""Calls of public functions and bindings with odd tensors, by seed: a program of its own.

Every call must end in an answer or a Python exception; where the odd tensor shows the same numbers
as a plain one, in the same answer. It runs in a process of its own, so that a crash is seen.

    python -m native.odd_tensors CALLS SEED
"""

import contextlib
import faulthandler
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import lmhead
from lmhead import _native
from lmhead.sampling import distribution
from lmhead.sweep import kernels

VOCAB, WIDTH = 300, 24


class Labelled(Tensor):
    """A subclass that adds nothing."""


def freed(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def shrunk(t: Tensor) -> Tensor:
    t = t.clone()
    t.untyped_storage().resize_(t.nbytes // 2)
    return t


def misaligned(t: Tensor) -> Tensor:
    flat = t.contiguous().view(-1)
    odd = torch.frombuffer(
        bytearray(flat.nbytes + 1), dtype=flat.dtype, offset=1, count=flat.numel()
    )
    return odd.copy_(flat).view(t.shape)


def spaced(t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, 7)], -1)[..., 0]


def turned(t: Tensor) -> Tensor:
    return t.t().contiguous().t() if t.dim() == 2 else spaced(t)


def inside(t: Tensor) -> Tensor:
    """A view into a larger storage, not at its begin."""
    return torch.cat([t[:1], t, t[:1]])[1:-1]


def distributed(t: Tensor) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    return distribute_tensor(t, mesh, [Replicate()])


# These show the numbers of the tensor they are made of: the answer is known.
FAITHFUL: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda t: t,
    "negated view": lambda t: torch._neg_view(-t),
    "spaced": spaced,
    "turned": turned,
    "inside": inside,
    "misaligned": misaligned,
    "subclass": lambda t: t.clone().as_subclass(Labelled),
    "parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=t.is_floating_point()),
    "inference": lambda t: torch.inference_mode()(torch.clone)(t),
}
# These do not, or are refused.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "freed": freed,
    "shrunk": shrunk,
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "meta": lambda t: t.to("meta"),
    "zero tensor": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "sparse": lambda t: t.to_sparse(),
    "expanded": lambda t: t[:1].expand(t.shape),
    "empty": lambda t: t[:0],
    "double": lambda t: t.double() if t.is_floating_point() else t.int(),
    "half": lambda t: t.half() if t.is_floating_point() else t.short(),
    "bfloat16": lambda t: t.bfloat16() if t.is_floating_point() else t.to(torch.uint8),
    "complex": lambda t: t.to(torch.complex64).conj(),
    "nan": lambda t: torch.full_like(t, torch.nan if t.is_floating_point() else -1),
    "huge": lambda t: torch.full_like(t, 3e38 if t.is_floating_point() else 2**62),
    "flat": lambda t: t.reshape(-1),
    "distributed": distributed,
}


class Given(NamedTuple):
    hidden: Tensor  # (n, WIDTH)
    weight: Tensor  # (VOCAB, WIDTH)
    bias: Tensor  # (VOCAB,)
    ids: Tensor  # (n,)


def query(x: Given) -> Any:
    found = lmhead.query(
        x.hidden,
        x.weight,
        bias=x.bias,
        log_prob=x.ids,
        rank=x.ids,
        entropy=True,
        argmax=True,
        top_k=3,
    )
    assert found.top_k is not None
    return found.argmax, found.rank, found.top_k.indices, found.entropy, found.log_prob


def loss(x: Given) -> Any:
    return (lmhead.linear_cross_entropy(x.hidden, x.weight, x.ids, bias=x.bias),)


def loss_and_gradient(x: Given) -> Any:
    hidden = x.hidden.detach().requires_grad_()
    value = lmhead.linear_cross_entropy(hidden, x.weight, x.ids, bias=x.bias, label_smoothing=0.1)
    return value, *torch.autograd.grad(value, hidden)


def head(x: Given) -> Any:
    linear = torch.nn.Linear(WIDTH, VOCAB)
    linear.weight = torch.nn.Parameter(x.weight, requires_grad=False)
    linear.bias = torch.nn.Parameter(x.bias, requires_grad=False)
    logits = lmhead.LMHead.from_linear(linear)(x.hidden)
    return logits.argmax(-1), logits.log_softmax(-1).gather(-1, x.ids[:, None])


def screened(x: Given) -> Any:
    made = lmhead.LMHead(WIDTH, VOCAB, bias=True)
    made.weight.data, made.bias.data = x.weight.detach(), x.bias.detach()  # type: ignore[union-attr]
    found = lmhead.ScreenedHead(made)
    return found.argmax(x.hidden).token, found.topk(x.hidden, 3).indices


def screened_then_changed(x: Given) -> Any:
    made = lmhead.LMHead(WIDTH, VOCAB)
    found = lmhead.ScreenedHead(made)
    made.weight.data = x.weight.detach()
    with contextlib.suppress(RuntimeError, ValueError, TypeError):  # it is stale
        found.argmax(x.hidden)
    return ()


def tree(x: Given) -> Any:
    torch.manual_seed(0)
    made = lmhead.HierarchicalHead(WIDTH, VOCAB, tree="balanced")
    made.weight.data = x.weight.detach()[:-1]
    logits = made(x.hidden)
    return logits.argmax(-1), made.log_prob(x.hidden, x.ids)


def sampler(x: Given) -> Any:
    made = lmhead.Sampler(temperature=0.7, top_p=0.9, seed=3)
    return (made(x.weight, position=4).token,)


def sampler_steps(x: Given) -> Any:
    n = len(x.weight)
    keys = distribution.make_keys([5] * n, torch.arange(n))
    largest, count = distribution.row_max(x.weight)
    beta = torch.ones(n, dtype=torch.float64)
    return (
        largest,
        count,
        distribution.gumbel_argmax(x.weight, beta, keys),
        distribution.uniforms(keys[:1], x.ids[None]),
    )


def all_products(x: Given) -> Any:
    return (kernels.row_logits(x.hidden, x.weight),)


def binding(x: Given) -> Any:
    out = torch.empty(len(x.hidden), len(x.weight), dtype=torch.float64)
    assert kernels.core is not None
    kernels.core.row_logits(x.hidden, x.weight, out, 2)
    return (out,)


def bare_binding(x: Given) -> Any:
    """Without the checks of `native`: what has no memory is still refused."""
    if any("shrunk" in kind for kind in LAST):
        return ()  # only Python sees a storage that is too small
    out = torch.empty(len(x.hidden), len(x.weight), dtype=torch.float64)
    _native.row_logits(x.hidden, x.weight, out, 2)
    return ()


def mapped(x: Given) -> Any:
    return (torch.vmap(lambda h: lmhead.query(h[None], x.weight, argmax=True).argmax)(x.hidden),)


def threads(x: Given) -> Any:
    out = torch.empty(len(x.hidden), len(x.weight), dtype=torch.float64)
    assert kernels.core is not None
    kernels.core.row_logits(x.hidden, x.weight, out, 100_000)
    return (out,)


CALLS: list[Callable[[Given], Any]] = [
    query, loss, loss_and_gradient, head, screened, screened_then_changed, tree, sampler,
    sampler_steps, all_products, binding, bare_binding, mapped, threads,
]  # fmt: skip
LAST: list[str] = []


def same(found: Any, want: Any) -> bool:
    for x, y in zip(found, want, strict=True):
        if (x is None) != (y is None):
            return True  # the core does not serve: nothing to compare
        if x is None:
            continue
        x, y = x.detach().double(), y.detach().double()
        if x.shape != y.shape or not torch.allclose(x, y, rtol=1e-4, atol=1e-4, equal_nan=True):
            return False
    return True


def some(n: int) -> Given:
    hidden, weight = torch.randn(n, WIDTH), torch.randn(VOCAB, WIDTH)
    return Given(hidden, weight, torch.randn(VOCAB), torch.randint(VOCAB, (n,)))


def main(calls: int, seed: int) -> None:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    chance = random.Random(seed)
    answers = refused = 0
    for call in CALLS:
        call(some(9))  # every one of them answers where nothing is odd
    for number in range(calls):
        torch.manual_seed(chance.randrange(2**31))
        n = chance.choice([1, 1, 3, 8, 17])
        plain = some(n)
        call = chance.choice(CALLS)
        kinds = ["plain"] * 4
        for _ in range(chance.choice([1, 1, 2])):
            kinds[chance.randrange(4)] = chance.choice([*FAITHFUL, *OTHERS])
        LAST[:] = kinds
        if "turned" in kinds and call is bare_binding:
            continue
        try:
            made = Given(*((FAITHFUL | OTHERS)[k](t) for k, t in zip(kinds, plain, strict=True)))
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            continue  # torch cannot make it
        print(number, call.__name__, *zip(Given._fields, kinds, strict=True), file=sys.stderr)
        try:
            found = call(made)
        except Exception:
            refused += 1
            continue
        answers += 1
        if all(k in FAITHFUL for k in kinds) and call is not bare_binding:
            assert same(found, call(plain)), f"{call.__name__} {kinds} answers otherwise"
    print(f"{answers} answers, {refused} refused")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
