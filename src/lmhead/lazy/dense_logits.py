"""Lazy logits that become dense, and stay a view of their tensor: `become_dense`."""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.lazy.building import values, warn
from lmhead.lazy.logits import Base, LazyLogits, build_rows, plain, seen_rows
from lmhead.lazy.memory import Memory
from lmhead.lazy.program import Dense, version


def become_dense(
    logits: LazyLogits, what: str, *, outside: bool = False, attach: bool = False
) -> Tensor:
    """Build these logits, and return them as a tensor.

    Constants are a view of the tensor from then on. With gradients it is a tensor of its own,
    unless `attach`: then the logits and all that share memory with them become views of one tensor.
    `outside`: its memory is handed out, and may be written to without torch's knowledge. The tensor
    is a constant then.
    """
    base = logits._shared
    if torch._C._are_functorch_transforms_active():
        return build_with_graph(logits, what)
    if outside or not plain(logits, "requires_grad") or base.constant:
        return _in_memory(logits, what, outside=outside)
    if not torch.is_grad_enabled():
        with torch.inference_mode(False), torch.enable_grad():
            return become_dense(logits, what, attach=attach)
    if base.memory is None and (attach or owned_tensor(base) is not None):
        return build_with_graph(logits, what)
    return logits.build(what)


def owned_tensor(base: Base) -> Tensor | None:
    """Return the tensor with a graph that all views of a base share, if it was built."""
    program = base.program
    if not isinstance(program, Dense) or program.operand.index is not None:
        return None
    tensor = program.operand.tensor
    return tensor if any(tensor is t for t, _ in base.built) else None


def _in_memory(logits: LazyLogits, what: str, *, outside: bool) -> Tensor:
    """Return the logits as a view of the memory that all views share."""
    base, rows = logits._shared, seen_rows(logits)
    dtype = plain(logits, "dtype")
    program = base.program
    memory = base.memory
    if memory is None:
        owned = owned_tensor(base)
        if owned is not None:
            stored = owned.detach().reshape(-1, program.width)
            filled = torch.ones(program.n_rows, dtype=torch.bool)
            memory = Memory(stored, filled)
            if base.recorded:
                # Programs that read the tensor raise if they are used after this.
                torch.autograd.graph.increment_version(owned)
        else:
            memory = Memory.empty(program.n_rows, program.width, dtype, plain(logits, "device"))
    elif outside and base.recorded and not memory.outside:
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
    tensor = memory.rows.view(*base.lead, program.width)
    for view in logits._chain:
        tensor = view.dense(tensor)
    return tensor.movedim(-1, logits._vdim)


def build_with_graph(logits: LazyLogits, what: str) -> Tensor:
    """Build all that shares memory with the logits, which become a view of one tensor."""
    base, chain = logits._shared, logits._chain
    tensor = owned_tensor(base)
    if tensor is None:
        whole = logits.behind() if not chain else base.node
        tensor = build_rows(whole, logits, what, base.lead)
        base.program, base.memory = Dense.of(tensor), None
        base.version += 1
        logits._own = None if chain else base.program
        base.built.append((tensor, version(tensor)))
    for view in chain:
        tensor = view.dense(tensor)
    return tensor.movedim(-1, logits._vdim)


def note_sharing(logits: LazyLogits) -> bool:
    """Note that tensors outside share memory with logits that were built; False: ask again.

    False if programs read that memory, which is replaced by a copy then, or if there is no memory
    that all views share.
    """
    base = logits._shared
    memory = base.memory
    if plain(logits, "requires_grad") and not base.constant:
        if memory is not None:
            raise RuntimeError(
                "a view of lazy logits that require a gradient cannot share their memory, which "
                "was exported (data_ptr, numpy, .data); clone() them first"
            )
        base.shared = owned_tensor(base) is not None
        return base.shared
    if memory is None:  # inside a transform of torch.func
        return True
    if base.recorded and not memory.outside:
        base.memory, base.version = memory.copied(), base.version + 1
        base.recorded = False
        return False
    base.version += not memory.outside
    memory.outside = True
    return True


def _warn(logits: LazyLogits, what: str) -> None:
    shape, constant = (
        (*logits.lead, logits._shared.program.width),
        not plain(logits, "requires_grad"),
    )
    warn(what, shape, plain(logits, "dtype"), constant=constant)
