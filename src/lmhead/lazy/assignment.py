"""Writes to lazy logits: another program takes the place of theirs, and of all views of it."""

from __future__ import annotations

import torch

from lmhead.lazy import positions, routing
from lmhead.lazy.building import values
from lmhead.lazy.logits import Detached, LazyLogits, note_position, plain, seen_rows, with_values
from lmhead.lazy.program import Node


def assign(logits: LazyLogits, node: Node) -> LazyLogits:
    """Make `node` the value of these logits, and of all that share their memory."""
    base = logits._shared
    before = [base.node]
    for view in logits._chain:
        before.append(view.of(before[-1]))
    silent = unknown_to_autograd(logits)
    live: Node | None = None
    if silent and plain(logits, "requires_grad"):
        node = with_values(logits.node, node)
    elif not plain(logits, "requires_grad") and not torch.is_grad_enabled():
        live, node = node, node.frozen()
    elif silent and routing.differentiable([node]):
        raise learned_while_detached()
    if not silent:
        positions.check_watched(logits)
    whole = node
    for view, outer in zip(reversed(logits._chain), reversed(before[:-1]), strict=True):
        whole = view.put(outer, whole)
    if base.exposed:
        _write(logits, whole)
    else:
        base.memory = None  # no one else has it
    base.program, base.version, base.writes = whole, base.version + 1, base.writes + 1
    logits._seen, logits._live = (-1 if base.exposed else base.version, node), None
    if live is not None and not base.exposed:
        logits._live = (base.version, live)
    if not silent:
        positions.take(logits, node)
    return logits


def learned_while_detached() -> RuntimeError:
    """Return the error of writing what requires a gradient to detached logits."""
    return RuntimeError(
        "an in-place operation cannot give a gradient to detached lazy logits, which share "
        "memory with logits that have one; clone() them first"
    )


def unknown_to_autograd(logits: LazyLogits) -> bool:
    """Whether a write to these logits changes values and no gradients."""
    if plain(logits, "requires_grad"):
        return not torch.is_grad_enabled()
    detached = any(isinstance(view, Detached) for view in logits._chain)
    return detached and not logits._shared.constant


def _write(logits: LazyLogits, whole: Node) -> None:
    """Write rows of a new program to the memory that others share."""
    base = logits._shared
    memory, rows = base.memory, seen_rows(logits)
    assert memory is not None
    rows = torch.arange(whole.n_rows) if rows is None else rows.unique()  # type: ignore[no-untyped-call]
    rows = rows[memory.filled[rows]]
    if len(rows):
        memory.fill(rows, values(whole.take(rows), memory.rows.dtype, logits.max_bytes))


def become_view(logits: LazyLogits, view: LazyLogits) -> None:
    """Let an object take the place of a view of it, whose shape it has already."""
    logits._shared, logits._chain, logits._vdim = view._shared, view._chain, view._vdim
    logits._seen, logits._live = view._seen, view._live
    logits._built = logits._through = None
    routing.record(view.node, lambda: logits, itself=logits)
    note_position(logits, view.node)
    logits._own = None
