"""Logits in code that users write: own autograd functions, reused buffers, long programs.

Each was wrong once; values and gradients are compared with those of dense logits.
"""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lmhead import LMHead

V, D = 31, 6
pytestmark = pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")

Make = tuple[Any, Tensor, Tensor]


def make(kind: str, dtype: torch.dtype = torch.float64, rows: int = 3, positions: int = 5) -> Make:
    """A head, hidden states and ids; the same numbers for both kinds."""
    torch.manual_seed(0)
    linear = nn.Linear(D, V, dtype=dtype)
    hidden = torch.randn(rows, positions, D, dtype=dtype, requires_grad=True)
    head = linear if kind == "dense" else LMHead.from_linear(linear)
    return head, hidden, torch.randint(V, (rows, positions))


def assert_as_dense(function: Callable[[Any, Tensor], Tensor]) -> None:
    """Compare the values of function(logits, ids), and all gradients."""
    found = []
    for kind in ("dense", "lazy"):
        head, hidden, ids = make(kind)
        out = function(head(hidden), ids)
        if out.requires_grad:
            torch.autograd.backward(out.sum())
        found.append((out.detach(), hidden.grad, head.weight.grad, head.bias.grad))
    for plain, ours in zip(*found, strict=True):
        assert (ours is None) == (plain is None)
        if plain is not None:
            assert ours.dtype == plain.dtype
            torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)


def applied(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[[Any], Any]:
    class Written(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, z: Any) -> Any:  # noqa: ARG004
            return forward(z)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # noqa: ARG004
            return backward(grad)

    return Written.apply


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "doubled": (lambda z: z * 2.0, lambda g: g * 2.0),
    "clamp, straight through": (lambda z: z.clamp(-1, 1), lambda g: g),
    "round, straight through": (lambda z: z.round(), lambda g: g),
    "softcap, straight through": (lambda z: torch.tanh(z / 3) * 3, lambda g: g),
    "softmax, straight through": (lambda z: z.softmax(-1), lambda g: g),
    "masked, straight through": (lambda z: z.masked_fill(z < 0, -9.0), lambda g: g),
    "reversed gradient": (lambda z: z.view_as(z), lambda g: -g),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autograd_functions(name: str) -> None:
    function = applied(*FUNCTIONS[name])
    assert_as_dense(lambda z, ids: F.cross_entropy(function(z).view(-1, V), ids.view(-1)))
    assert_as_dense(lambda z, ids: (function(z * 0.7) + z).gather(-1, ids[..., None]).sum())


def test_autograd_function_of_another() -> None:
    inner, outer = applied(*FUNCTIONS["doubled"]), applied(lambda z: z.view_as(z), lambda g: g)
    assert_as_dense(lambda z, ids: F.cross_entropy(outer(inner(z)).view(-1, V), ids.view(-1)))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(z: Any) -> Any:
        return z * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # noqa: ARG004
        return grad * 2


def test_autograd_function_with_setup_context() -> None:
    doubled: Any = Doubled.apply
    assert_as_dense(lambda z, ids: F.cross_entropy(doubled(z).view(-1, V), ids.view(-1)))


@pytest.mark.parametrize("other", [False, True])
def test_copy_as_a_positional_argument_of_to(other: bool) -> None:
    def function(z: Any, ids: Tensor) -> Tensor:  # noqa: ARG001
        y = z.to(torch.empty(0, dtype=z.dtype) if other else z.dtype, False, True)
        y.mul_(2.0)
        return z.logsumexp(-1)  # type: ignore[no-any-return]

    assert_as_dense(function)


def test_complex_results_keep_gradients() -> None:
    assert_as_dense(lambda z, _: (z * (1 + 2j)).sum(-1).abs())


def test_class_weight_and_an_ignore_index_beyond_the_vocabulary() -> None:
    def function(z: Any, ids: Tensor) -> Tensor:
        weight = torch.linspace(0.5, 2, V, dtype=z.dtype)
        targets = ids.masked_fill(ids % 3 == 0, 10_000).view(-1)
        return F.cross_entropy((z * z).view(-1, V), targets, weight=weight, ignore_index=10_000)

    assert_as_dense(function)


def test_equal_maxima_share_a_gradient_in_float64() -> None:
    assert_as_dense(lambda z, _: torch.stack([z, z, z]).max())


def test_nll_loss_under_autocast_is_float32() -> None:
    found = []
    for kind in ("dense", "lazy"):
        head, hidden, ids = make(kind, torch.float32)
        z = head(hidden)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(F.nll_loss(z.bfloat16().tanh().view(-1, V), ids.view(-1)))
    assert found[1].dtype == found[0].dtype == torch.float32
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=1e-3)


def test_a_reentrant_checkpoint_of_a_function_of_the_logits() -> None:
    def entropy(z: Any) -> Any:
        return (z.softmax(-1) * z.log_softmax(-1)).sum(-1)

    assert_as_dense(lambda z, _: checkpoint(entropy, z, use_reentrant=True))


def test_detached_logits_as_a_leaf() -> None:
    found = []
    for kind in ("dense", "lazy"):
        head, hidden, ids = make(kind)
        z = head(hidden).detach().requires_grad_()
        torch.autograd.backward(F.cross_entropy(z.view(-1, V) * 2, ids.view(-1)))
        assert z.is_leaf
        assert head.weight.grad is None
        found.append(z.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)
    with pytest.raises(RuntimeError, match="require a gradient if what is behind them does"):
        head(hidden).requires_grad_(False)


LATE: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "masked_fill": lambda z, mask, _: z.masked_fill(mask, -9.0),
    "where": lambda z, mask, _: torch.where(mask, z, -9.0),
    "times": lambda z, mask, _: z * mask,
    "scatter": lambda z, _, ids: z.scatter(-1, ids, 1.0),
}


@pytest.mark.parametrize("name", LATE)
def test_a_mask_rewritten_between_the_loss_and_backward_is_refused(name: str) -> None:
    for kind in ("dense", "lazy"):
        head, hidden, ids = make(kind)
        mask, ids = (torch.arange(3 * 5 * V) % 3 == 0).view(3, 5, V), ids[..., None].clone()
        value = LATE[name](head(hidden), mask, ids).square().sum()
        mask.zero_()
        ids.zero_()
        with pytest.raises(RuntimeError, match="modified"):
            value.backward()


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs an alarm")
@pytest.mark.parametrize("what", ["assisted decoding", "used twice"])
def test_a_program_that_uses_its_parts_twice_is_linear(what: str) -> None:
    def stop(*_: Any) -> None:
        raise TimeoutError("more than 15 s for what takes a millisecond dense")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(15)
    try:
        found = []
        for kind in ("dense", "lazy"):
            head, hidden, _ = make(kind, rows=1, positions=21)
            with torch.no_grad():
                z = head(hidden)
                for i in range(21):
                    if what == "used twice":
                        z = z + 0.1 * z.tanh()
                        continue
                    v = z[:, i, :] / 0.7
                    z[:, i, :] = v.masked_fill(v < v.topk(5).values[..., -1:], float("-inf"))
                found.append(z[:, :2].logsumexp(-1))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    torch.testing.assert_close(*found)


def test_two_writes_on_detached_logits_that_are_not_recorded() -> None:
    def function(z: Any, ids: Tensor) -> Any:  # noqa: ARG001
        rows, detached = torch.tensor([0, 1]), z.detach()
        for number in (9.0, 1.0):
            value = torch.tensor(number, dtype=z.dtype)
            detached.index_put_((rows, rows, rows + 3), value, accumulate=number == 1.0)
        return detached.logsumexp(-1)

    assert_as_dense(function)


def test_functions_of_nn_init() -> None:
    found = []
    for kind in ("dense", "lazy"):
        head, hidden, _ = make(kind)
        with torch.no_grad():
            z = head(hidden)
            nn.init.constant_(z, 3.0)
        found.append(z.sum(-1))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("vocab", [V, 3000])
def test_calls_leave_the_storage_of_the_weight_resizable(vocab: int) -> None:
    """FSDP frees a weight by resizing its storage; torch refuses that after `weight.numpy()`."""
    head, hidden = LMHead(96, vocab), torch.randn(128, 96)
    head(hidden).argmax(-1)
    torch.autograd.backward(F.cross_entropy(head(hidden), torch.randint(vocab, (128,))))
    assert head.weight.untyped_storage().resizable()
    assert hidden.untyped_storage().resizable()


REDUCTIONS = [
    "z.masked_fill(torch.rand(V) < .5, -9.).argmax(-1)",
    "(z.softmax(-1) < torch.rand(N, 1) * 1e-4).sum(-1)",
]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("code", REDUCTIONS)
def test_memory_of_a_reduction_without_gradient(code: str) -> None:
    """Small results between large temporaries must not keep those from the system."""
    script = f"""
import resource, torch
from lmhead import LMHead
N, V, D = 512, 131072, 16
head, hidden = LMHead(D, V).requires_grad_(False), torch.randn(N, D)
head.max_bytes = 32 << 20
(head(hidden[:4]) * 2).tanh().sum(-1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
z = head(hidden)
{code}
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 32 + 32, f"{done.stdout.strip()} MiB of 256"
