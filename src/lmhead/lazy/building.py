"""Building the tensor of a program: all rows, with a warning that says so."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lmhead import errors
from lmhead.errors import PerformanceWarning
from lmhead.lazy import routing
from lmhead.lazy.program import Env, Node, check_unchanged, current
from lmhead.lazy.replay import replay
from lmhead.scores import DenseScores

# Constants of up to this many bytes are built without a warning: a sampler needs its few rows.
QUIET_BYTES = 2**23


def warn(what: str, shape: tuple[int, ...], dtype: torch.dtype, *, constant: bool) -> None:
    """Warn that logits are built, except of few constants."""
    size = math.prod(shape) * dtype.itemsize
    if size > QUIET_BYTES or what == "materialize()" or not constant:
        warnings.warn(
            f"{what} builds all logits: {shape} {dtype}, {size / 2**20:,.1f} MiB",
            PerformanceWarning,
            stacklevel=caller_depth(),
        )


def _rows_of(node: Node, dtype: torch.dtype, max_bytes: int | None, env: Env) -> Tensor:
    """Compute all rows of a program, in memory of their own."""
    found = node.scores(env)
    if found is not None:
        rows = found.dense().to(dtype).contiguous()
        return rows.clone() if isinstance(found, DenseScores) else rows

    def block(tiles: Sequence[Tensor], first: int, last: int) -> tuple[Tensor, ...]:
        # A block of all rows is the result itself, and may be expanded or an operand's memory.
        return (tiles[0].to(dtype, copy=last - first == node.n_rows),)

    return replay([node], block, env, max_bytes=max_bytes)[0]


def values(node: Node, dtype: torch.dtype, max_bytes: int | None) -> Tensor:
    """Compute all rows of a program as constants, in memory of their own."""
    node = node.frozen()
    check_unchanged([node])
    with torch.inference_mode(False), torch.no_grad():
        return _rows_of(node, dtype, max_bytes, current([node]))


def build(node: Node, dtype: torch.dtype, max_bytes: int | None) -> Tensor:
    """Compute all rows of a program, with their gradients: (N, V)."""

    def rows(env: Env) -> tuple[Tensor, ...]:
        return (_rows_of(node, dtype, max_bytes, env),)

    return routing.answer(rows, [node])[0]


def caller_depth() -> int:
    """Return the stack depth of the first caller outside lmhead and torch."""
    ours = tuple(str(Path(module.__file__ or "").parent) for module in (torch, errors))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level
