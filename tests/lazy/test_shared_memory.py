"""Memory that was given out: arrays, tensors and lazy views of the same logits see each other.

Each test does the same to dense and to lazy logits. Random programs take views, hand out memory,
write to it, change logits in place and derive others from them, in any order.
"""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmhead import LMHead

N, V, D = 4, 40, 8

pytestmark = pytest.mark.filterwarnings("ignore::lmhead.PerformanceWarning")


def both(grad: bool = False) -> tuple[Tensor, Tensor, LMHead, Tensor]:
    torch.manual_seed(3)
    head, hidden = LMHead(D, V), torch.randn(N, D, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        lazy = head(hidden)
        return head(hidden).materialize() * 1, lazy, head, hidden


def overlapping(z: Tensor) -> Any:
    a, b = z[0:2].numpy(), z[1:3].numpy()
    a[1, 5] = 99
    b[1, 7] = 77
    return a, b, z.max(-1).values


def rows_then_all(z: Tensor) -> Any:
    a, b = z[0:2].numpy(), z.numpy()
    a[1, 5] = 99
    return a, b, z.max(-1).values


def in_place_after_array(z: Tensor) -> Any:
    a = z[1:].numpy()
    z.mul_(2)
    z[2, 3] = 50
    return a, z.amax(-1)


def write_to_built_view(z: Tensor) -> Any:
    v = z[0:2]
    a = v.numpy()
    v[1, 5] = 77
    return a, z.max(-1).values, v.sum(-1)


def derived_before_the_write(z: Tensor) -> Any:
    a = z[0:2].numpy()
    twice = z * 2
    a[:] = 5
    return twice.sum(-1), z.sum(-1)


def built_and_derived_before_the_array(z: Tensor) -> Any:
    z.sort(-1)
    twice = z * 2
    a = z.numpy()
    a[:] = 5
    return twice.sum(-1), z.sum(-1)


def a_flat_view(z: Tensor) -> Any:
    flat = z.view(-1)
    z.mul_(3)
    flat[7] = 60
    return flat.sum(), z.max(-1).values


def a_flat_view_after_a_program(z: Tensor) -> Any:
    z.sort(-1)
    twice = z * 2
    flat = z.view(-1)
    flat.numpy()[7] = 60
    return twice.sum(-1), z.max(-1).values


def tokens_and_rows(z: Tensor) -> Any:
    a, b = z[1:3].numpy(), z[:, :20].numpy()
    a[1, 5] = 99
    b[3, 1] = 88
    return a, b, z.max(-1).values


def a_token_of_all_rows(z: Tensor) -> Any:
    a = z.numpy()
    column = z[:, 3]
    a[1, 3] = 30
    column += 1
    return a, column, z.sum(-1)


def a_token_and_the_array_of_a_row(z: Tensor) -> Any:
    a = z[1].numpy()
    column = z[:, 3]
    a[3] = 30
    return column.sum(), z.sum(-1)


def a_pointer(z: Tensor) -> Any:
    z[2].data_ptr()
    z[1:3].data.add_(4)
    return z.logsumexp(-1), z.argmax(-1)


def what_returns_itself(z: Tensor) -> Any:
    z.numpy()
    same = z.mul_(2)
    same.add_(1)
    assert same is z
    return z.sum(-1), z.cumsum_(-1).sum(-1), z.unsqueeze_(0).shape


SNIPPETS: list[Callable[[Tensor], Any]] = [
    overlapping, rows_then_all, in_place_after_array, write_to_built_view,
    derived_before_the_write, built_and_derived_before_the_array, a_flat_view,
    a_flat_view_after_a_program, tokens_and_rows, a_token_of_all_rows,
    a_token_and_the_array_of_a_row, a_pointer, what_returns_itself,
]  # fmt: skip


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda s: s.__name__)
def test_constants(snippet: Callable[[Tensor], Any]) -> None:
    dense, lazy, _, _ = both()
    with torch.no_grad():
        expected, found = snippet(dense), snippet(lazy)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5)


def test_rows_of_an_array_cost_their_own_memory() -> None:
    """Room for all rows is address space, not memory."""
    head, hidden = LMHead(4, 2**17, bias=False), torch.randn(4096, 4)
    with torch.no_grad():
        logits = head(hidden)
        before = _resident()
        a, b = logits[0:2].numpy(), logits[1:3].numpy()
        a[1, 5] = 99
    assert b[0, 5] == 99
    assert _resident() - before < 64 * 2**20  # all rows are 2 GiB


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@pytest.mark.parametrize("way", ["data", "detached", "pointer"])
def test_values_from_memory_with_gradients_of_the_head(way: str) -> None:
    """A write of which autograd does not know: values change, gradients are those of the head."""
    results = []
    for z, head, hidden in _differentiable_pairs():
        before = z.exp()
        if way == "data":
            z.data[1, 3] = 5.0
        elif way == "detached":
            z.detach()[1].numpy()[3] = 5.0
        else:
            z.data_ptr()
            z.data.add_(1)
        after = z.exp()
        loss = before.sum() + after.sum() + z.logsumexp(-1).sum()
        torch.autograd.backward(loss)
        results.append((loss.detach(), hidden.grad, head.weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_in_place_on_memory_that_was_given_out_with_gradients() -> None:
    results = []
    for z, head, hidden in _differentiable_pairs():
        z.data[1, 3] = 5.0
        array = z.detach().numpy()
        z = z.pow_(2)
        with torch.no_grad():
            z[2].mul_(3)
        loss = z.sum() + z.exp().clamp(max=100).sum()
        torch.autograd.backward(loss)
        results.append((loss.detach(), torch.tensor(array), hidden.grad, head.weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def test_a_flat_view_with_gradients() -> None:
    results = []
    for z, head, hidden in _differentiable_pairs():
        flat = z.view(-1)
        z.mul_(3)
        flat.add_(1)
        loss = (flat**2).sum() + z.logsumexp(-1).sum()
        torch.autograd.backward(loss)
        results.append((loss.detach(), hidden.grad, head.weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def _differentiable_pairs() -> list[tuple[Tensor, LMHead, Tensor]]:
    made = []
    for lazy in (False, True):
        torch.manual_seed(3)
        head, hidden = LMHead(D, V), torch.randn(N, D, requires_grad=True)
        logits = head(hidden)
        made.append((logits if lazy else logits.materialize() * 1, head, hidden))
    return made


def test_arrays_of_logits_with_gradients_are_refused_before_they_are_built() -> None:
    _, lazy, _, _ = both(grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="requires grad"):
            lazy.numpy()
        with pytest.raises(BufferError, match="require gradient"):
            lazy.__dlpack__()


# Random programs ---------------------------------------------------------------------------------

_REFUSAL = re.compile(
    "modified in place|modified by an inplace|not supported|exported|written to through"
)


class _Program:
    """The same random steps on dense or lazy logits."""

    def __init__(self, z: Tensor, seed: int, *, grad: bool = False) -> None:
        self.random, self.grad = random.Random(seed), grad
        self.logits, self.answers = [z], list[Tensor]()
        self.outside: list[Any] = []  # arrays and tensors

    def run(self, steps: int) -> None:
        for _ in range(steps):
            step = self.random.choice(
                [self.view, self.view, self.give_out, self.give_out, self.write_outside,
                 self.write_outside, self.in_place, self.in_place, self.unrecorded, self.derive,
                 self.ask, self.ask, self.column]
            )  # fmt: skip
            step()
        for z in self.logits:
            self.answers.append(z.sum())
        for array in self.outside:
            self.answers.append(torch.as_tensor(array).detach().sum())

    def any(self) -> Tensor:
        return self.random.choice(self.logits)

    def view(self) -> None:
        z, kind = self.any(), self.random.randrange(5)
        n = z.shape[0]
        low = self.random.randrange(n)
        if kind == 0:
            made = z[low:]
        elif kind == 1:
            made = z[: low + 1]
        elif kind == 2:
            made = z[low : low + 1]
        elif kind == 3:
            made = z[::2]
        else:
            made = z[:, : max(2, z.shape[1] - 3)]
        self.logits.append(made)

    def give_out(self) -> None:
        z, kind = self.any(), self.random.randrange(4)
        if kind == 0:
            self.outside.append(z.detach().numpy())
        elif kind == 1:
            self.outside.append(z.data)
        elif kind == 2:
            self.outside.append(np.asarray(z.detach()))
        elif z.is_contiguous():
            self.outside.append(z.detach().view(-1))

    def write_outside(self) -> None:
        value = self.random.randrange(5, 9)
        if self.outside:
            array = self.random.choice(self.outside)
            place = self.random.randrange(array.shape[-1])
            array[..., place] = value

    def in_place(self) -> None:
        with torch.set_grad_enabled(self.grad and self.random.random() < 0.6):
            self.write()

    def write(self) -> None:
        z, kind = self.any(), self.random.randrange(5)
        low = self.random.randrange(z.shape[0])
        if kind == 0:
            z.mul_(0.5)
        elif kind == 1:
            z[low, 1] = 3.0
        elif kind == 2:
            z.clamp_(max=2.0)
        elif kind == 3:
            z[low:] += 1.0
        else:
            z.masked_fill_(torch.arange(z.shape[1]) % 5 == 0, -1.0)

    def unrecorded(self) -> None:
        z, kind = self.any(), self.random.randrange(3)
        if kind == 0:
            self.answers.append(z.sort(-1).values[:, 0].sum())
        elif kind == 1:
            self.answers.append(z.cumsum(-1)[:, -1].sum())
        else:
            z.cumsum_(-1)
            z.clamp_(-9, 9)

    def derive(self) -> None:
        z = self.any()
        self.logits.append(z * 0.5 if self.random.random() < 0.5 else z.softmax(-1).add(0.1))

    def ask(self) -> None:
        z = self.any()
        self.answers.append(z.mul(0.1).exp().sum() if self.grad else z.logsumexp(-1).sum())
        self.answers.append(z.detach().amax(-1).sum())

    def column(self) -> None:
        z = self.any()
        self.answers.append(z[..., 1].sum())


@pytest.mark.parametrize("grad", [False, True], ids=["constants", "gradients"])
@pytest.mark.parametrize("block", range(4))
def test_random_sharing(block: int, grad: bool) -> None:
    """Every answer, array and gradient is that of dense logits, or an error says why not."""
    done = refused = 0
    for seed in range(block * 40, block * 40 + 40):
        results: list[Any] = []
        for z, head, hidden in _differentiable_pairs():
            program = _Program(z if grad else z.detach().clone(), seed, grad=grad)
            try:
                with torch.set_grad_enabled(grad):
                    program.run(14)
                    if grad:
                        torch.autograd.backward(torch.stack(program.answers).sum())
            except RuntimeError as error:
                if len(results) and not _REFUSAL.search(str(error)):  # torch has refusals too
                    raise
                refused += len(results)
                break
            results.append([*program.answers, *([hidden.grad, head.weight.grad] if grad else [])])
        if len(results) < 2:
            continue
        done += 1
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            close = torch.allclose(b, a, rtol=1e-4, atol=1e-4)
            assert close, f"seed {seed}, result {i}: {b} lazy, {a} dense"
    assert done > 10
    assert refused < (30 if grad else 8)


ONE_ROW: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "fill_(parameter)": lambda z, scalar, row: z.fill_(scalar).data,  # noqa: ARG005
    "fill_(number)": lambda z, scalar, row: z.fill_(0.5).data,  # noqa: ARG005
    "copy_": lambda z, scalar, row: z.copy_(row).data,  # noqa: ARG005
    "cat": lambda z, scalar, row: torch.cat([row, z[:0]]).detach().numpy(),  # noqa: ARG005
}


@pytest.mark.parametrize("built", ONE_ROW)
def test_memory_of_one_row_is_that_of_nothing_else(built: str) -> None:
    results = []
    for lazy in (False, True):
        torch.manual_seed(3)
        head = LMHead(D, V)
        z = head(torch.ones(1, D))
        z = z if lazy else z.materialize() * 1
        scalar, row = torch.nn.Parameter(torch.tensor(0.5)), torch.ones(1, V)
        memory = ONE_ROW[built](z, scalar, row)
        memory[0, 2] = 9
        results.append([scalar.item(), row, torch.as_tensor(memory), z[:, 3:].sum()])
    torch.testing.assert_close(results[1], results[0])


def test_tensor_of_one_row_has_memory_for_every_entry() -> None:
    logits: Any = LMHead(D, V)(torch.ones(1, D)).detach().zero_()
    tensor = logits.materialize()
    tensor[0, 2] = 1
    assert (tensor.sum(), logits.sum()) == (1, 0)


def test_deep_copies_share_memory_as_the_logits_do() -> None:
    results = []
    dense, lazy, head, _ = both()
    for z in (dense, lazy):
        before = z.sum()
        row, whole, turned = copy.deepcopy([z[0], z, z[1:].transpose(0, 1)])
        whole.mul_(2)
        row.add_(1)
        row.numpy()[3] = 9
        turned[0, 0] = 5
        results.append([row.sum(), whole.sum(), turned.sum(0), before, z.sum()])
    torch.testing.assert_close(results[1], results[0])
    with torch.no_grad():
        head.weight.zero_()
    assert float(whole.sum()) == float(results[1][1])
