"""Lazy logits that become dense, and stay a view of their tensor: `become_dense`."""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.lazy import routing
from lmhead.lazy.building import values, warn
from lmhead.lazy.logits import Base, LazyLogits, assign, build_rows, plain, seen_rows
from lmhead.lazy.memory import Memory, values_of
from lmhead.lazy.program import Call, Dense, Node, version


def become_dense(logits: LazyLogits, what: str, *, outside: bool = False) -> Tensor:
    """Build these logits, which are a view of the tensor from then on, and return it.

    `outside`: its memory is handed out, and may be written to without torch's knowledge. The tensor
    is a constant then. Otherwise it has its gradient, also under `torch.no_grad()`, since the
    logits are used later.
    """
    base = logits._shared
    base.check()
    if torch._C._are_functorch_transforms_active():
        return _build_with_graph(logits, what)
    if outside or not plain(logits, "requires_grad") or base.constant:
        return _in_memory(logits, what, outside=outside)
    if not torch.is_grad_enabled():
        with torch.inference_mode(False), torch.enable_grad():
            return become_dense(logits, what)
    if base.memory is not None:
        tensor = build_rows(logits.part, logits, what, logits.lead)
        return tensor.movedim(-1, logits._vdim)
    return _build_with_graph(logits, what)


def _in_memory(logits: LazyLogits, what: str, *, outside: bool) -> Tensor:
    """Return the logits as a view of the memory that all views share."""
    base, rows = logits._shared, seen_rows(logits)
    dtype = plain(logits, "dtype")
    program = base.program
    memory = base.memory
    if memory is None:
        if isinstance(program, Dense) and program.operand.index is None:
            stored = program.operand.tensor.detach().reshape(-1, program.width)
            filled = torch.ones(program.n_rows, dtype=torch.bool)
            memory = Memory(stored, filled)
            if base.recorded:
                # Programs that read the tensor raise if they are used after this.
                torch.autograd.graph.increment_version(program.operand.tensor)
        else:
            memory = Memory.empty(program.n_rows, program.width, dtype, plain(logits, "device"))
    if outside and base.recorded and not memory.outside:
        memory, base.recorded = memory.copied(), False
    missing = torch.arange(program.n_rows) if rows is None else rows.unique()  # type: ignore[no-untyped-call]
    missing = missing[~memory.filled[missing]]
    if len(missing) == program.n_rows:
        _warn(logits, what)
        rows_now = values(program, dtype, logits.max_bytes)
        memory = Memory(rows_now, torch.ones(program.n_rows, dtype=torch.bool))
    elif len(missing):
        _warn(logits, what)
        memory.fill(missing, values(program.take(missing), dtype, logits.max_bytes))
    if memory is not base.memory or len(missing) or outside > memory.outside:
        base.memory, base.version = memory, base.version + 1
    memory.outside |= outside
    if outside and base.parent is not None:
        base.parent.parts_shared = True
    tensor = memory.rows.view(*base.lead, program.width)
    for view in logits._chain:
        tensor = view.dense(tensor)
    return tensor.movedim(-1, logits._vdim)


def _build_with_graph(logits: LazyLogits, what: str) -> Tensor:
    """Return the logits as a tensor, with its gradient, of which they are a view from then on."""
    base, chain = logits._shared, logits._chain
    program = base.program
    built = isinstance(program, Dense) and program.operand.index is None
    if chain and not any(view.tokens is not None for view in chain):
        # A view of some rows: build these alone, and let the base read them from the tensor.
        if not built:
            lead = logits.lead
            tensor = build_rows(logits.behind(), logits, what, lead)
            dense = Dense.of(tensor)
            parent = base if _distinct(logits) else None  # torch refuses to write to shared entries
            if parent is not None:
                shared: Node = dense
                if plain(logits, "requires_grad") and not routing.can_bypass(logits):
                    # The gradients of the base do not pass through the hooks of this view.
                    shared = Call(values_of, (dense, logits.node), {}, dense.n_rows, dense.width)
                assign(logits, shared, built=True)
                base.built.append((tensor, version(tensor)))
            logits._shared, logits._chain = Base(dense, lead, parent=parent), ()
            logits._shared.built.append((tensor, version(tensor)))
            logits._seen, logits._own = (0, dense), dense
            return tensor.movedim(-1, logits._vdim)
    elif not built:
        whole = logits.behind() if not chain else program
        tensor = build_rows(whole, logits, what, base.lead)
        program = base.program = Dense.of(tensor)
        base.version += 1
        logits._own = None if chain else program
        base.built.append((tensor, version(tensor)))
    assert isinstance(program, Dense)
    tensor = program.operand.tensor
    if tensor.shape[:-1] != base.lead:  # built as a view of all rows
        tensor = tensor.view(*base.lead, tensor.shape[-1])
    for view in chain:
        tensor = view.dense(tensor)
    return tensor.movedim(-1, logits._vdim)


def note_sharing(logits: LazyLogits) -> bool:
    """Note that tensors outside share memory with logits that were built; False: ask again.

    False if programs read that memory, which is replaced by a copy then.
    """
    base = logits._shared
    memory = base.memory
    if memory is None:
        base.shared = True
        if base.parent is not None:
            base.parent.parts_shared = True
        return True
    if plain(logits, "requires_grad") and not base.constant:
        raise RuntimeError(
            "a view of lazy logits that require a gradient cannot share their memory, which was "
            "exported (data_ptr, numpy, .data); clone() them first"
        )
    if base.recorded and not memory.outside:
        base.memory, base.version = memory.copied(), base.version + 1
        base.recorded = False
        return False
    base.version += not memory.outside
    memory.outside = True
    return True


def _distinct(logits: LazyLogits) -> bool:
    """Whether no row of the base is seen twice."""
    rows = seen_rows(logits)
    return rows is None or len(rows.unique()) == len(rows)  # type: ignore[no-untyped-call]


def _warn(logits: LazyLogits, what: str) -> None:
    shape, constant = (
        (*logits.lead, logits._shared.program.width),
        not plain(logits, "requires_grad"),
    )
    warn(what, shape, plain(logits, "dtype"), constant=constant)
