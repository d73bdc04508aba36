"""Places of lazy logits in the autograd graph, after a write to memory that they share.

A write to one object changes the program of all that share its memory. The object that was written
to becomes the node of its new program; the others follow here.
"""

from __future__ import annotations

import torch

from lmhead.lazy import routing
from lmhead.lazy.dense_logits import owned_tensor
from lmhead.lazy.logits import Base, LazyLogits, note_position, plain
from lmhead.lazy.program import Dense, Node, version

# Up to this many objects are recorded again at once; more of them only when they are used.
_AT_ONCE = 8


def take(logits: LazyLogits, node: Node) -> None:
    """Make these logits the node of a program, and let what shares their memory follow."""
    _record(logits, node)
    _follow(logits._shared, logits)


def take_dense(logits: LazyLogits) -> None:
    """Do the same after a write to the tensor that the logits were built as."""
    _renew_tensor(logits._shared)
    take(logits, logits.node)


def update(logits: LazyLogits) -> None:
    """Record logits again that did not follow yet."""
    base = logits._shared
    with torch.inference_mode(False), torch.enable_grad():
        if base.shared and any(version(t) != then for t, then in base.built):
            base.version, base.writes = base.version + 1, base.writes + 1
            _renew_tensor(base)
            _follow(base, None)
        if logits._stale:
            _record(logits, logits.node)


def before_hooks(logits: LazyLogits, name: str) -> None:
    """Prepare logits for hooks: raise if results would not pass through the object."""
    base = logits._shared
    used = [logits] if logits._chain else base.objects.values()
    if routing.can_bypass(logits) and any(z._passed for z in used):
        raise RuntimeError(
            f"{name}() must be called before lazy logits are used: gradients of results "
            "computed before do not pass through them"
        )
    exported = base.exposed and not logits._chain and routing.has_own_node(logits)
    if exported or (base.shared and logits._own is not base.program):
        raise RuntimeError(
            f"{name}() is not supported on lazy logits that were built and share their memory "
            "with other tensors or arrays; clone() them first"
        )
    if base.writes != logits._writes and routing.can_bypass(logits):  # written to under no_grad
        with torch.inference_mode(False), torch.enable_grad():
            _record(logits, logits.node)


def after_hooks(logits: LazyLogits) -> None:
    """Let gradients of all that shares memory with logits that have hooks pass through them."""
    if not logits._chain and routing.has_own_node(logits):
        with torch.inference_mode(False), torch.enable_grad():
            _follow(logits._shared, logits)


def check_hooks(base: Base, name: str) -> None:
    """Raise if a write to a tensor would let results pass by an object with hooks."""
    if base.shared and _watched(base) is not None:
        raise RuntimeError(
            f"{name} is not supported on lazy logits with hooks or retain_grad() that were built "
            "and share their memory with other tensors; clone() them first"
        )


def check_watched(logits: LazyLogits) -> None:
    """Raise if a write would follow one under no_grad to an object with hooks.

    The hooks belong to the values before both, and no gradient reaches these any more.
    """
    whole = _watched(logits._shared)
    if whole is not None and whole._writes != logits._shared.writes:
        raise routing.written_elsewhere()


def _watched(base: Base) -> LazyLogits | None:
    """Return the object that shows all of a base, if it has hooks or retains its gradient."""
    for logits in base.objects.values():
        if not logits._chain and routing.is_watched(logits) and routing.has_own_node(logits):
            return logits
    return None


def _record(logits: LazyLogits, node: Node) -> None:
    """Make these logits the node of a program."""
    logits._stale = False
    with torch._C.DisableTorchFunctionSubclass():
        if logits._backward_hooks and not logits.retains_grad:
            # As in torch, hooks belong to the values before the write.
            logits.detach_()
            logits._backward_hooks = None
    routing.record(node, lambda: logits, itself=logits)
    note_position(logits, node)
    logits._own = None


def _renew_tensor(base: Base) -> None:
    """Make another node of a tensor after a write to it."""
    tensor = owned_tensor(base)
    if tensor is not None:
        base.program = Dense.of(tensor)
        base.built = [(tensor, version(tensor))]


def _follow(base: Base, written: LazyLogits | None) -> None:
    """Record all objects but one again; of more than a few, the nodes raise until they are used."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return
    whole = _watched(base)
    if whole is not None and whole._own is not base.program and not base.shared:
        if whole is not written:
            _record(whole, base.node)
        base.program, base.version = whole.through(), base.version + 1
        whole._seen = (-1 if base.exposed else base.version, whole._position)
        written = whole
    others = [z for z in base.objects.values() if z is not written and z._shared is base]
    for other in others:
        if plain(other, "requires_grad") and not routing.has_own_node(other):
            continue
        if len(others) <= _AT_ONCE:
            _record(other, other.node)
        elif not other._stale:
            routing.refuse(other)
            other._stale = True
