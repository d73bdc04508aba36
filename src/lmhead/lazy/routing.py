"""How answers about lazy logits join the autograd graph.

`head(hidden)` makes one node of the graph, as `nn.Linear` would: hooks, DDP and FSDP see the head
where it was called. An answer (a loss, a log-probability) is computed straight from the head's
tensors, with its gradients by the sweep; in the backward pass these travel to the head's node
inside a `LazyGradient`, through whatever the logits passed on their way.

`form` recognises programs that the compiled sweep can answer.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lmhead.lazy.memory import share_memory
from lmhead.lazy.program import (
    Call,
    Env,
    Leaf,
    Node,
    Operand,
    Root,
    check_unchanged,
    current,
    current_roots,
    gradients,
    sources,
    version,
)
from lmhead.lazy.replay import replay
from lmhead.scores import Scores
from lmhead.sweep.gradient_sums import Adding, GradientSums
from lmhead.sweep.second_order import alias
from lmhead.sweep.wide_gradients import summed_in_float32, unwrap

Payload = Any
"""Gradients behind a root: a list, one entry per tensor of its scores; or, for a root with a
program, a pair of lists: payloads of its roots, and gradients of its operands."""

Function = Callable[[Env], tuple[Tensor, ...]]
"""An answer: from the tensors to use to the results, differentiable in those tensors."""


def answer(function: Function, nodes: Sequence[Node]) -> tuple[Tensor, ...]:
    """Return function's results, joined to the graph behind the programs it reads."""
    roots, tensors = sources(nodes)
    check_unchanged(nodes)
    if torch._C._are_functorch_transforms_active():
        return function(Env())  # the transform follows the tensors themselves
    if not torch.is_grad_enabled():
        return function(current_roots(roots))
    if not _differentiable(roots, tensors):
        with torch.no_grad():
            return function(current_roots(roots))
    if all(root.handle is None for root in roots):
        return function(current_roots(roots))
    handles = [root.handle for root in roots]
    made: tuple[Tensor, ...] = _Answer.apply(function, roots, tensors, *handles, *tensors)  # type: ignore[no-untyped-call]
    return made


class Form(NamedTuple):
    """A program as a head's scores, perhaps normalised, plus a term per row."""

    leaf: Node
    kind: str  # "logits", "log_probs" or "probs"
    terms: tuple[tuple[Operand, float], ...] = ()

    def shift(self, env: Env) -> Any:
        """Return what is added to each row, (N, 1) or a number."""
        total: Any = 0.0
        for operand, factor in self.terms:
            n = self.leaf.n_rows
            total = total + factor * operand.dense(env, 0, n).double()
        return total


def form(node: Node) -> Form | None:
    """Recognise scores, their softmax and log_softmax, and shifts by a term per row."""
    outer: list[Call] = []
    while not node.is_scores:
        if not isinstance(node, Call) or node.name.strip("_") not in _FORMS:
            return None
        outer.append(node)
        inner = node.args[0]
        if not isinstance(inner, Node):
            return None
        node = inner
    found: Form | None = Form(node, "logits")
    for call in reversed(outer):
        found = None if found is None else _form_after(found, call)
    return found


_FORMS = ("softmax", "log_softmax", "exp", "log", "add", "sub")


def _form_after(inner: Form, call: Call) -> Form | None:
    name = call.name.strip("_")
    if name in ("softmax", "log_softmax"):
        if inner.kind == "probs":
            return None
        return Form(inner.leaf, "probs" if name == "softmax" else "log_probs")
    if name in ("exp", "log"):
        if inner.terms:
            return None
        if (name, inner.kind) == ("exp", "log_probs"):
            return Form(inner.leaf, "probs")
        if (name, inner.kind) == ("log", "probs"):
            return Form(inner.leaf, "log_probs")
        return None
    if len(call.args) != 2 or call.kwargs or inner.kind == "probs":
        return None
    second = call.args[1]
    if not isinstance(second, Operand) or second.width > 1 or not _is_finite(second.tensor):
        return None
    factor = 1.0 if name == "add" else -1.0
    return inner._replace(terms=(*inner.terms, (second, factor)))


def _is_finite(t: Tensor) -> bool:
    """Whether a term per row is finite: a row of only -inf is no distribution."""
    if t.device.type == "meta" or torch._C._are_functorch_transforms_active():
        return True
    return bool(t.isfinite().all())


def differentiable(nodes: Sequence[Node]) -> bool:
    """Whether programs have a gradient."""
    return _differentiable(*sources(nodes))


def _differentiable(roots: Sequence[Root], tensors: Sequence[Tensor]) -> bool:
    if any(t.requires_grad for t in tensors):
        return True
    return any(_requires_grad(root) for root in roots)


def _requires_grad(root: Root) -> bool:
    if root.handle is not None:
        return root.handle.requires_grad
    if root.node is not None:
        return _differentiable(*sources([root.node]))
    return any(t.requires_grad for t in root.own.tensors())


class _Substitutes:
    """Tensors in place of those behind roots and operands, to differentiate by.

    Detached if `fresh`. Else, for a double backward pass, they are aliases; an object of the user
    is replaced by its entries, so that second derivatives pass through it, too.
    """

    def __init__(self, roots: Sequence[Root], tensors: Sequence[Tensor], *, fresh: bool) -> None:
        self.roots, self.tensors, self.fresh = roots, tensors, fresh
        self.leaves: list[Tensor] = []
        self.env = self._env(roots, tensors)

    def _env(self, roots: Sequence[Root], operands: Sequence[Tensor]) -> Env:
        by_root: dict[Root, tuple[Tensor, ...]] = {}
        scopes: dict[Root, Env] = {}
        stand_ins: dict[Root, Tensor] = {}
        for root in roots:
            if self._has_entries(root):
                stand_ins[root] = self._entries(root)
            elif root.node is not None:
                scopes[root] = self._env(*sources([root.node]))
            else:
                tensors = root.gathered() or root.own.tensors()
                by_root[root] = tuple(self._leaf(t) for t in tensors)
        return Env(by_root, {id(t): self._leaf(t) for t in operands}, scopes, stand_ins)

    def _has_entries(self, root: Root) -> bool:
        return not self.fresh and root.node is not None and root.handle is not None

    def _entries(self, root: Root) -> Tensor:
        """Return the rows of an object of the user, computed from one leaf with all its entries."""
        node, handle = root.node, root.handle
        assert node is not None
        assert handle is not None
        vdim = handle._vdim  # type: ignore[attr-defined]
        with torch.no_grad():
            values = node.dense(current([node]), 0, node.n_rows)
        lead = [n for d, n in enumerate(handle.shape) if d != vdim]
        rows = join(handle, vdim, lambda: values)
        entries = self._leaf(rows.view(*lead, node.width).movedim(-1, vdim))
        return entries.movedim(vdim, -1).reshape(rows.shape)

    def _leaf(self, t: Tensor) -> Tensor:
        leaf = t.detach().requires_grad_(t.requires_grad) if self.fresh else alias(t)
        self.leaves.append(leaf)
        return leaf

    def payloads(self, grads: Sequence[Tensor | None]) -> tuple[list[Payload], list[Tensor | None]]:
        """Return gradients of `leaves` as one payload per root, and those of the operands."""
        return self._unflatten(self.roots, self.tensors, iter(grads))  # type: ignore[no-any-return]

    def _unflatten(self, roots: Sequence[Root], tensors: Sequence[Tensor], grads: Any) -> Any:
        payloads: list[Payload] = []
        for root in roots:
            if self._has_entries(root):
                payloads.append(next(grads))
            elif root.node is not None:
                payloads.append(self._unflatten(*sources([root.node]), grads))
            else:
                payloads.append([next(grads) for _ in root.own.tensors()])
        return payloads, [next(grads) for _ in tensors]


class _Answer(torch.autograd.Function):
    """An answer, as an operation on the logits it was asked of."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Function,
        roots: Sequence[Root],
        tensors: Sequence[Tensor],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        within = _Substitutes(roots, tensors, fresh=True)
        with torch.enable_grad():
            outputs = function(within.env)
        results = tuple(o.detach() for o in outputs)
        ctx.function, ctx.roots, ctx.tensors = function, roots, tensors
        ctx.versions = [version(t) for t in tensors]
        ctx.within, ctx.outputs = within, outputs
        ctx.save_for_backward(results[0].new_empty(0))  # so that autograd refuses a second pass
        ctx.forms = [_form(handle) for handle in inputs[: len(roots)]]
        ctx.set_materialize_grads(False)
        constant = [r for r, o in zip(results, outputs, strict=True) if not o.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        _ = ctx.saved_tensors
        within, outputs = ctx.within, ctx.outputs
        again = torch.is_grad_enabled()  # double backward: from the tensors themselves
        if again:
            _check_unchanged(ctx)
            within = _Substitutes(ctx.roots, ctx.tensors, fresh=False)
            outputs = ctx.function(within.env)

        def run(sums: Sequence[GradientSums]) -> tuple[list[Payload], list[Tensor | None]]:
            if not sums:
                found = _gradients(outputs, grads, within.leaves, create_graph=again)
                return within.payloads(found)  # type: ignore[no-any-return]
            adding = Adding(sums, [within.env.root_tensors(root) for root in ctx.roots])
            with adding:
                found = _gradients(outputs, grads, within.leaves, create_graph=False)
            n = len(found) - len(ctx.tensors)
            adding.put(found[:n])
            return [], found[n:]

        pending = _Pending(run, ctx.roots)
        to_tensors: list[Tensor | None] = [None] * len(ctx.tensors)
        if again or any(t.requires_grad for t in ctx.tensors):
            to_tensors = pending.run_now()

        def dense(root: Root) -> Tensor:
            _check_unchanged(ctx)
            return _dense_gradient(ctx.function, ctx.roots, ctx.tensors, root, grads)

        handed = _handed(ctx.roots, pending.payloads(len(ctx.roots)), ctx.forms, dense)
        return (None, None, None, *handed, *to_tensors)


def _check_unchanged(ctx: Any) -> None:
    """Raise if a tensor behind an answer was modified in place since then."""
    for root in ctx.roots:
        root.check_unchanged()
    if [version(t) for t in ctx.tensors] != ctx.versions:
        raise RuntimeError(
            "a tensor that was combined with lazy logits was modified in place after the result "
            "was computed, so its gradient can no longer be computed. Clone it before the change"
        )


class _Pending:
    """Gradients of an answer that are computed when the head's own node needs them.

    Many answers about parts of the logits then need one gradient of the weight, not one each.

    Args:
        run: computes the payload of each root and the gradients of the operands. With sums, one per
            root, the payloads are these sums, and this answer's gradients are added to them.
        roots: the roots of the answer.
    """

    def __init__(
        self,
        run: Callable[[Sequence[GradientSums]], tuple[list[Payload], list[Tensor | None]]],
        roots: Sequence[Root],
    ) -> None:
        self._run, self._roots = run, roots
        self._made: dict[int, Payload] | None = None
        self._sums: dict[int, GradientSums] = {}  # of payloads that were not taken yet
        self._taken: set[int] = set()

    def run_now(self, given: dict[int, GradientSums] | None = None) -> list[Tensor | None]:
        """Compute; return the gradients of the operands.

        A payload is added to the sums given for its root, or to those of an earlier answer about
        the same head that still waits for them: all go to the node of that head.
        """
        if torch.is_grad_enabled() or any(root.node is not None for root in self._roots):
            payloads, to_tensors = self._run(())
            self._made = dict(enumerate(payloads))
            return to_tensors
        sums, self._made = [], {}
        for place, root in enumerate(self._roots):
            found, waiting = (given or {}).get(place), _waiting(root)
            if found is not None and waiting is not None:
                found.take(waiting)
            found = found or waiting
            if found is None:
                self._sums[place] = found = GradientSums()
                root.waiting = _graph_task(), weakref.ref(found)
            else:
                self._made[place] = None
            sums.append(found)
        return self._run(sums)[1]

    def payloads(self, n: int) -> list[Callable[[GradientSums | None], Payload]]:
        """Return what gives the payload of each of n roots."""
        return [partial(self._take, place) for place in range(n)]

    def _take(self, place: int, sums: GradientSums | None) -> Payload:
        """Return a payload; None if it was added to `sums` or to those of another answer."""
        if place in self._taken:  # of a gradient that was kept, and is used once more
            return self._run(())[0][place]
        self._taken.add(place)
        if self._made is None and sums is None and len(self._roots) == 1:
            self._made = dict(enumerate(self._run(())[0]))  # the only answer
        elif self._made is None:
            self.run_now({place: sums} if sums is not None else None)
        if place in self._sums:
            own = self._sums.pop(place)
            if sums is None:
                return own.totals
            sums.take(own)
            return None
        return self._made.pop(place)  # type: ignore[union-attr]


def _waiting(root: Root) -> GradientSums | None:
    """Return sums of gradients for the same head that this backward pass has not taken yet."""
    task, sums = root.waiting or (None, None)
    return sums() if sums is not None and task == _graph_task() else None


def _graph_task() -> int:
    """Return the number of the backward pass: a hook may run another one inside it."""
    return torch._C._current_graph_task_id()


def _form(handle: Tensor | None) -> Any:
    return None if handle is None else (handle.shape, handle.dtype, handle.device)


def _rows(grad: Tensor, vdim: int) -> Tensor:
    """Return a gradient of logits whose vocabulary is at `vdim` as rows (N, V)."""
    moved = grad.movedim(vdim, -1)
    return moved.reshape(moved.shape[:-1].numel(), moved.shape[-1])


def _as_logits(rows: Tensor, handle: Any) -> Tensor:
    """Return a gradient of rows (N, V) in the shape of logits; of a `Handle`, as it is."""
    if isinstance(handle, Handle):
        return rows
    vdim = handle._vdim
    lead = [n for d, n in enumerate(handle.shape) if d != vdim]
    return rows.reshape(*lead, rows.shape[-1]).movedim(-1, vdim)


def _handed(
    roots: Sequence[Root],
    payloads: Sequence[Callable[[GradientSums | None], Payload]],
    forms: Sequence[Any],
    dense: Callable[[Root], Tensor],
) -> list[Tensor | None]:
    """Return the gradient of each root's handle; None for constants."""

    def entries(root: Root) -> Tensor:
        return _as_logits(dense(root), root.handle)

    handed: list[Tensor | None] = []
    for root, payload, form in zip(roots, payloads, forms, strict=True):
        if form is None:
            handed.append(None)
        elif root.node is not None and torch.is_grad_enabled():
            grad = payload(None)  # of the entries: see `_Substitutes`
            if grad is None:
                shape, dtype, device = form
                grad = torch.zeros(shape, dtype=dtype, device=device)
            handed.append(grad)
        else:
            behind = root.scores if root.node is None else root.node
            made = _Entries([(payload, ())], partial(entries, root), behind)
            handed.append(LazyGradient(made, form))
    return handed


def _gradients(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    *,
    create_graph: bool,
) -> list[Tensor | None]:
    """Return the gradients of the leaves that require one, None for the others."""
    pairs = [
        (o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad
    ]
    half = any(leaf.dtype.itemsize < 4 for leaf in leaves)
    with summed_in_float32() if half else nullcontext():
        made = gradients(pairs, leaves, create_graph=create_graph)
    return [unwrap(g) if half and g is not None else g for g in made]


def _dense_gradient(
    function: Function,
    roots: Sequence[Root],
    tensors: Sequence[Tensor],
    root: Root,
    grads: Sequence[Tensor | None],
) -> Tensor:
    """Return the gradient of an answer with respect to the logits of one root, as a tensor."""
    within = _Substitutes(roots, tensors, fresh=True)
    leaf = Leaf(root, torch.float64)
    with torch.no_grad():
        z = leaf.dense(within.env, 0, leaf.n_rows)
    if root.scores is not None:
        z = z.to(root.scores.dtype)
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        outputs = function(within.env.with_stand_in(root, z))
    (found,) = _gradients(outputs, grads, [z], create_graph=False)
    return torch.zeros_like(z) if found is None else found


Terms = list[tuple[Callable[[GradientSums | None], Payload], tuple[tuple[str, Any], ...]]]


@dataclass
class _Entries:
    """What a gradient of lazy logits is: terms, and its entries once they were built.

    `behind`: the scores or the program of these logits.
    `shared`: the entries may have been written to, and count instead of the terms.
    """

    terms: Terms
    build: Callable[[], Tensor]
    behind: Any
    dense: Tensor | None = None
    shared: bool = False


class LazyGradient(Tensor):
    """The gradient of lazy logits: the gradients it causes in the tensors behind them.

    It has the shape of the logits. Anything that needs its entries builds them. Sums and multiples
    are kept as terms, and computed by `payload` where autograd can follow them.
    """

    entries: _Entries  # of this gradient and all that share memory with it

    @staticmethod
    def __new__(cls, entries: _Entries, form: tuple[Any, Any, Any]) -> LazyGradient:
        """Make one of a shape, dtype and device."""
        shape, dtype, device = form
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.entries = entries
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def payload(self) -> Payload:
        """The gradients of all tensors behind the logits."""
        terms = self.entries.terms
        if len(terms) == 1 and not terms[0][1]:
            return terms[0][0](None)
        total: Payload = None
        sums = GradientSums()
        for take, factors in terms:
            made = take(None if factors else sums)
            for name, factor in factors:
                made = _map(made, lambda g, n=name, f=factor: getattr(g, n)(f))  # type: ignore[misc]
            if isinstance(made, list) and not torch.is_grad_enabled():
                sums.add(made)
            elif made is not None:
                total = made if total is None else _add(total, made)
        return (sums.totals or None) if total is None else total

    def materialize(self) -> Tensor:
        """Return the gradient as a tensor."""
        entries = self.entries
        if entries.dense is None:
            with autograd():
                made = entries.build().to(self.dtype)
                # The scalar that represents a head has one entry: NaN if there is any.
                one = self.numel() == 1 and made.numel() != 1
                entries.dense = (made.sum() if one else made).reshape(self.shape)
        return entries.dense

    def _snapshot(self) -> LazyGradient:
        """Return the same gradient, which later changes of this one do not reach."""
        entries = self.entries
        dense = entries.dense
        if entries.shared and dense is not None:
            dense = dense.clone()
        return LazyGradient(replace(entries, dense=dense), _form(self))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Keep copies, sums and multiples lazy; build the tensor for everything else."""
        name, first = func.overloadpacket.__name__, args[0]
        plain = not kwargs or set(kwargs) <= {"memory_format"}
        if isinstance(first, LazyGradient) and plain:
            if name in ("detach", "alias", "view_as") and len(args) == 1:
                return LazyGradient(first.entries, _form(first))
            if name == "clone":
                return first._snapshot()
            made = _lazily(name, first, args[1] if len(args) == 2 else None)
            if made is not None and not name.endswith("_"):
                return made
            if made is not None:
                first.entries.__dict__.update(made.entries.__dict__)
                return first
        given: list[LazyGradient] = []

        def build(x: Any) -> Any:
            if not isinstance(x, LazyGradient):
                return x
            given.append(x)
            if func._schema.is_mutable and not x.entries.shared:
                x.entries.dense = x.materialize().clone()  # a copy may have it as well
                x.entries.shared = True
            return x.materialize()

        made = func(*tree_map(build, args), **tree_map(build, kwargs or {}))
        for x in given:
            dense = x.materialize()
            if any(share_memory(t, dense) for t in tree_leaves(made) if isinstance(t, Tensor)):
                x.entries.shared = True
        return first if func._schema.is_mutable and isinstance(first, LazyGradient) else made


def _lazily(name: str, first: LazyGradient, other: Any) -> LazyGradient | None:
    """Return a sum or a multiple of a gradient as terms; None if it cannot be kept so."""
    if first.entries.shared:
        return None
    a = first._snapshot()
    if name in ("add", "add_") and isinstance(other, LazyGradient) and not other.entries.shared:
        b = other._snapshot()
        terms = a.entries.terms + b.entries.terms
        if len({id(take) for take, _ in terms}) < len(terms):
            return None  # each is taken once
        if a.entries.behind is not b.entries.behind:
            return None
        return LazyGradient(
            _Entries(terms, lambda: a.materialize() + b.materialize(), a.entries.behind),
            _form(first),
        )
    if name in ("mul", "div", "mul_", "div_") and _is_scalar(other):
        op = name.removesuffix("_")
        terms = [(payload, (*done, (op, other))) for payload, done in a.entries.terms]
        return LazyGradient(
            _Entries(terms, lambda: getattr(a.materialize(), op)(other), a.entries.behind),
            _form(first),
        )
    return None


def as_written(grad: Tensor, is_own: Callable[[Any], bool]) -> Tensor:
    """Return a gradient; its entries if they may have been written to, or are of other logits."""
    if isinstance(grad, LazyGradient) and (grad.entries.shared or not is_own(grad.entries.behind)):
        return grad.materialize()
    return grad


def _leads_to(scores: Scores, behind: Any) -> bool:
    """Whether these scores are all that a program is made of."""
    return isinstance(behind, Node) and all(r.scores is scores for r in sources([behind])[0])


@contextmanager
def autograd() -> Iterator[None]:
    """Let autograd record operations here: within `__torch_dispatch__` it does not."""
    keys = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradOther", "AutogradFunctionality", "ADInplaceOrView"):
        keys = keys.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys):
        yield


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not isinstance(value, LazyGradient)
    return isinstance(value, int | float)


def _map(payload: Payload, change: Callable[[Tensor], Tensor | None]) -> Payload:
    if isinstance(payload, list | tuple):
        return type(payload)(_map(p, change) for p in payload)
    return None if payload is None else change(payload)


def _add(a: Payload, b: Payload) -> Payload:
    if isinstance(a, list | tuple):
        return type(a)(_add(x, y) for x, y in zip(a, b, strict=True))
    if a is None or b is None:
        return b if a is None else a
    return a + b


class _Head(torch.autograd.Function):
    """The node of a head: from its tensors to lazy logits, and a handle for answers.

    Outputs: what the user gets, and the handle. Both stand for the same scores.
    """

    @staticmethod
    def forward(
        ctx: Any, root: Root, make: Callable[[], tuple[Tensor, Tensor]], *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.scores, ctx.count = root.scores, len(tensors)
        ctx.root = root.without_handle()  # which would keep this node
        return make()

    @staticmethod
    def backward(ctx: Any, to_logits: Tensor | None, to_handle: Tensor | None) -> Any:
        total: Payload = None
        for given, user in ((to_logits, True), (to_handle, False)):
            if given is None:
                continue
            # The user's object is a root with a program, whose only root is this head.
            own = partial(_leads_to, ctx.scores) if user else partial(operator.is_, ctx.scores)
            grad = as_written(given, own)
            if isinstance(grad, LazyGradient):
                payload = grad.payload[0][0] if user else grad.payload
            else:
                ctx.root.check_unchanged()
                payload = _dense_payload(ctx.scores, grad)
            if payload is not None:
                total = payload if total is None else _add(total, payload)
        found = [None] * ctx.count if total is None else total
        if to_logits is not None or to_handle is not None:
            # What no result depends on any more (after zero_(), for example) has a gradient of 0.
            found = [
                torch.zeros_like(t) if g is None and t.requires_grad else g
                for g, t in zip(found, ctx.scores.tensors(), strict=True)
            ]
        return (None, None, *found)


def _dense_payload(scores: Any, grad: Tensor) -> Payload:
    """Return the gradients of a head's tensors, from the gradient of all logits."""
    again = torch.is_grad_enabled()
    tensors = scores.tensors()
    leaves = [alias(t) if again else t.detach().requires_grad_(t.requires_grad) for t in tensors]
    with torch.enable_grad():
        z = scores.with_tensors(leaves).dense()
    return _gradients([z], [grad.reshape(z.shape).to(z.dtype)], leaves, create_graph=again)


def enter(root: Root, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Make the node of a head, and what `make` returns its outputs."""
    made: tuple[Tensor, Tensor] = _Head.apply(root, make, *root.own.tensors())  # type: ignore[no-untyped-call]
    return made


class _Record(torch.autograd.Function):
    """The node of logits derived by recorded operations; in place if `itself` is given."""

    @staticmethod
    def forward(
        ctx: Any,
        node: Node,
        roots: Sequence[Root],
        tensors: Sequence[Tensor],
        make: Callable[[], Tensor],
        itself: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.node, ctx.roots, ctx.tensors = node, roots, tensors
        ctx.forms = [_form(handle) for handle in inputs[: len(roots)]]
        made: Any = make() if itself is None else itself
        ctx.vdim = made._vdim
        if itself is not None:
            ctx.mark_dirty(itself)
        return made  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * (5 + len(ctx.roots) + len(ctx.tensors))
        node, roots, tensors = ctx.node, ctx.roots, ctx.tensors
        grad = as_written(grad, partial(operator.is_, node))
        if isinstance(grad, LazyGradient) and not torch.is_grad_enabled():
            payloads, to_tensors = grad.payload
        else:
            check_unchanged([node])
            within = _Substitutes(roots, tensors, fresh=not torch.is_grad_enabled())
            with torch.enable_grad():
                (z,) = replay([node], lambda tiles, *_: (tiles[0],), within.env)
            found = _gradients(
                [z], [_rows(grad, ctx.vdim)], within.leaves, create_graph=torch.is_grad_enabled()
            )
            payloads, to_tensors = within.payloads(found)

        def dense(root: Root) -> Tensor:
            function: Function = lambda env: (node.dense(env, 0, node.n_rows),)  # noqa: E731
            whole = grad.materialize() if isinstance(grad, LazyGradient) else grad
            return _dense_gradient(function, roots, tensors, root, [_rows(whole, ctx.vdim)])

        given = [lambda _, p=p: p for p in payloads]
        handed = _handed(roots, given, ctx.forms, dense)
        return (None, None, None, None, None, *handed, *to_tensors)


def record(node: Node, make: Callable[[], Tensor], itself: Tensor | None = None) -> Tensor:
    """Return what `make` returns as a node of the graph that represents `node`.

    With `itself`, that tensor becomes the node instead, as after an in-place operation.
    """
    roots, tensors = sources([node])
    joined = torch.is_grad_enabled() and _differentiable(roots, tensors)
    if not joined or torch._C._are_functorch_transforms_active():
        return make() if itself is None else itself
    handles = [root.handle for root in roots]
    made: Tensor = _Record.apply(node, roots, tensors, make, itself, *handles, *tensors)  # type: ignore[no-untyped-call]
    return made


class Handle(Tensor):
    """The place of a head's logits in the graph: a scalar that represents all of them."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} was called on the handle of lazy logits")


class _Refused(torch.autograd.Function):
    """The node of logits that were written to through another object: raises if it is used."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> None:  # noqa: ARG004
        if grad is not None:
            raise written_elsewhere()


def refuse(logits: Tensor) -> None:
    """Let gradients of these logits raise: their node is that of values before a write."""
    _Refused.apply(logits)  # type: ignore[no-untyped-call]


def written_elsewhere() -> RuntimeError:
    """Return the error of gradients that would be those of the values before a write."""
    return RuntimeError(
        "hooks, retain_grad() or an autograd function are attached to these lazy logits, which "
        "were written to through another object or under no_grad afterwards; use "
        "logits.materialize() before that, or give the function logits.clone()"
    )


def can_bypass(logits: Tensor) -> bool:
    """Whether answers may join the graph behind these logits, not at the object itself.

    Not if it has hooks, or if another autograd function (of DDP, of a module hook) made it.
    """
    return not is_watched(logits) and has_own_node(logits)


def is_watched(logits: Tensor) -> bool:
    """Whether these logits have hooks, or retain their gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(logits._backward_hooks or logits.retains_grad)


def has_own_node(logits: Tensor) -> bool:
    """Whether the node of these logits in the graph is one of ours, not of another function."""
    ours = (_Head._backward_cls, _Record._backward_cls, _Refused._backward_cls)
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(logits.grad_fn, ours)


def is_passed_on(logits: Tensor, node: Node) -> bool:
    """Whether other autograd functions returned logits with the program that they were given."""
    with torch._C.DisableTorchFunctionSubclass():
        waiting: list[Any] = [logits.grad_fn]
    while waiting:
        function = waiting.pop()
        if isinstance(function, _Record._backward_cls):
            if function.node is node:  # type: ignore[attr-defined]
                return True
        elif isinstance(function, _Head._backward_cls):
            plain = isinstance(node, Leaf) and not node.steps
            if plain and node.root.scores is function.scores:  # type: ignore[attr-defined]
                return True
        elif function is not None:
            waiting.extend(before for before, _ in function.next_functions)
    return False


class _Join(torch.autograd.Function):
    """Dense rows in the place of lazy logits, which get their gradient as a tensor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, vdim: int, make: Callable[[], Tensor]) -> Tensor:
        lead = [n for d, n in enumerate(logits.shape) if d != vdim]
        ctx.shape, ctx.vdim = (*lead, logits.shape[vdim]), vdim
        return make()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.view(ctx.shape).movedim(-1, ctx.vdim), None, None


def join(logits: Tensor, vdim: int, make: Callable[[], Tensor]) -> Tensor:
    """Return what `make` returns, all rows (N, V); their gradient is passed to the logits."""
    made: Tensor = _Join.apply(logits, vdim, make)  # type: ignore[no-untyped-call]
    return made
