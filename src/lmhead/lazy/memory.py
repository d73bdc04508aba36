"""Memory of lazy logits that were built: one tensor, which all views of them share."""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.lazy.program import Call, Dense, Node
from lmhead.lazy.row_nodes import Overlay


class Memory:
    """Rows of a program that were built.

    There is room for every row. The operating system provides a page when a row of it is filled,
    so that the rows of one view cost no more than that view.

    Attributes:
        rows: (N, V), constants.
        filled: (N,), which of the rows were built.
        outside: whether tensors, arrays or pointers share this memory, which may write to it.
    """

    def __init__(self, rows: Tensor, filled: Tensor) -> None:
        self.rows, self.filled = rows, filled
        self.outside = False

    @classmethod
    def empty(cls, n: int, width: int, dtype: torch.dtype, device: torch.device) -> Memory:
        """Return memory without rows."""
        with torch.inference_mode(False):
            rows = torch.empty(n, width, dtype=dtype, device=device)
        return cls(rows, torch.zeros(n, dtype=torch.bool))

    def fill(self, index: Tensor, values: Tensor) -> None:
        """Set the values of some rows."""
        with torch.inference_mode(False), torch.no_grad():
            self.rows[index.to(self.rows.device)] = values
        self.filled[index] = True

    def copied(self) -> Memory:
        """Return a copy of the rows that are filled."""
        n, width = self.rows.shape
        made = Memory.empty(n, width, self.rows.dtype, self.rows.device)
        index = self.filled.nonzero()[:, 0]
        made.fill(index, self.rows[index.to(self.rows.device)])
        return made

    def read(self, program: Node, index: Tensor | None, *, constant: bool, copy: bool) -> Node:
        """Return rows of a program whose values are in this memory where they were built.

        Args:
            program: all rows; its gradients stay those of the values.
            index: the rows to return; None for all.
            constant: whether the program has no gradient.
            copy: return a snapshot, which later writes do not change.
        """
        filled = self.filled if index is None else self.filled[index]
        if index is not None:
            program = program.take(index)
        if not bool(filled.any()):
            return program
        places = filled.nonzero()[:, 0]
        every = len(places) == len(filled)
        stored = places if index is None else index[places]
        if copy:
            built: Node = Dense.of(self.rows[stored.to(self.rows.device)])
        else:
            built = Dense.of(self.rows)
            built = built if every and index is None else built.take(stored)
        new = built
        if not constant:
            behind = program if every else program.take(places)
            new = Call(values_of, (built, behind), {}, built.n_rows, built.width)
        if every:
            return new
        lookup = torch.full((len(filled),), -1, dtype=torch.int64)
        lookup[places] = torch.arange(len(places))
        return Overlay(program, lookup, new)


def values_of(values: Tensor, tile: Tensor) -> Tensor:
    """Return the values of one tensor, with the gradient of another."""
    made: Tensor = _Values.apply(values, tile)  # type: ignore[no-untyped-call]
    return made


class _Values(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: Tensor, tile: Tensor) -> Tensor:  # noqa: ARG004
        return values.to(tile.dtype, copy=True)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[None, Tensor]:  # noqa: ARG004
        return None, grad


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same memory, or parts of it."""
    for t in (a, b):
        if t.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(t):
            return False
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
