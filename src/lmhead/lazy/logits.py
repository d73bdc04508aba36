"""`LazyLogits`: what `head(hidden)` returns. Behaves like a tensor; computes nothing until queried.

An object is a view of a `Base`, which holds a program. Views of the same base see each other's
in-place changes, as views of one tensor do. What torch is asked to do with the object arrives in
`torch_function`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lmhead.checks import eager
from lmhead.html_table import html_table
from lmhead.lazy import routing
from lmhead.lazy.building import build, values, warn
from lmhead.lazy.lazy_query import ask
from lmhead.lazy.memory import Memory, values_of
from lmhead.lazy.program import (
    Call,
    Dense,
    Leaf,
    Node,
    Operand,
    Root,
    check_unchanged,
    current,
    index_of,
    version,
)
from lmhead.lazy.replay import replay
from lmhead.lazy.row_nodes import Overlay, stamped
from lmhead.scores import DenseScores, Rows, Scores
from lmhead.scores.answers import Answers


class View:
    """One step from a base to a view of it: some rows, a range of tokens, or another shape.

    `dense` is the same step on a tensor (*lead, V).
    """

    def __init__(
        self,
        dense: Callable[[Tensor], Tensor],
        rows: Rows | None = None,
        tokens: slice | None = None,
    ) -> None:
        self.dense, self.rows, self.tokens = dense, rows, tokens

    def of(self, node: Node) -> Node:
        """Return the view of a program."""
        if self.rows is not None:
            node = node.take(self.rows)
        return node if self.tokens is None else token_range(node, self.tokens)

    def beyond_rows(self, node: Node) -> Node:
        """Return the view of a program that has its rows already."""
        return node if self.tokens is None else token_range(node, self.tokens)

    def put(self, node: Node, part: Node) -> Node:
        """Return the program with the view replaced by `part`."""
        whole = node.take(self.rows) if self.rows is not None else node
        if self.tokens is not None:
            part = Call(_put_tokens, (whole, part, self.tokens), {}, whole.n_rows, whole.width)
        return part if self.rows is None else put_rows(node, self.rows, part)


class Detached(View):
    """The step to constants: a change through it changes values, not gradients."""

    def __init__(self) -> None:
        super().__init__(Tensor.detach)

    def of(self, node: Node) -> Node:
        """Return the program as constants."""
        return node.frozen()

    def beyond_rows(self, node: Node) -> Node:
        """Return the program as constants."""
        return node.frozen()

    def put(self, node: Node, part: Node) -> Node:
        """Return the program with the values of `part` and its own gradients."""
        return with_values(node, part)


def with_values(node: Node, part: Node) -> Node:
    """Return a program after a change of its values of which autograd does not know."""
    return Call(values_of, (part.frozen(), node), {}, node.n_rows, node.width)


class Base:
    """A program that views share, and the memory of its rows that were built.

    `version` increases whenever the program is replaced, `writes` only if that changed its values
    (building the tensor does not).
    """

    def __init__(self, program: Node, lead: torch.Size) -> None:
        self.program, self.lead, self.version, self.writes = program, lead, 0, 0
        self.memory: Memory | None = None
        self.built: list[tuple[Tensor, int | None]] = []  # tensors with a graph, their versions
        self.recorded = False  # whether programs read what was built
        self.shared = False  # whether tensors outside share memory with a tensor of `built`
        # The output of another autograd function that this was built from.
        self.foreign: weakref.ref[LazyLogits] | None = None
        # The objects that show it, by their id: tensors cannot be keys.
        self.objects: weakref.WeakValueDictionary[int, LazyLogits] = weakref.WeakValueDictionary()

    @property
    def node(self) -> Node:
        """The program, with the rows that were built read from memory."""
        return self.read(None)

    @property
    def constant(self) -> bool:
        """Whether the program has no gradient."""
        return not routing.differentiable([self.program])

    @property
    def exposed(self) -> bool:
        """Whether others may have written to memory of it."""
        return self.memory is not None and self.memory.outside

    def read(self, index: Tensor | None, *, copy: bool = False) -> Node:
        """Return some rows (None for all); `copy`: a snapshot of the values."""
        if self.memory is None:
            return self.program if index is None else self.program.take(index)
        return self.memory.read(self.program, index, constant=self.constant, copy=copy)

    def untouched(self, writes: int) -> bool:
        """Return whether the values are unchanged since `writes` writes; building is no change."""
        same = all(version(t) == then for t, then in self.built)
        return same and self.writes == writes and not self.exposed


class LazyLogits(Tensor):
    """Logits of shape (..., V) that are not built unless something needs all of them.

    Equivalent to: the tensor of the same shape, dtype and device

    Pointwise operations, masks, views and in-place operations are recorded; reductions over the
    vocabulary are computed a few rows at a time. `explain()` says what a question will cost,
    `materialize()` builds the tensor.

    >>> from lmhead import LMHead
    >>> logits = LMHead(16, 100)(torch.randn(4, 16))
    >>> logits
    LazyLogits(shape=(4, 100), dtype=torch.float32, not computed)
    >>> (logits / 0.7).log_softmax(-1).max(-1).values.shape
    torch.Size([4])
    """

    _shared: Base
    _chain: tuple[View, ...]
    _vdim: int
    _seen: tuple[int, Node]
    _built: tuple[int, Tensor, int | None] | None  # what `materialize` returned, and its versions
    # Made under no_grad: the version, and the program with gradients, for autograd functions.
    _live: tuple[int, Node] | None
    _through: weakref.ref[Leaf] | None  # what `through` returned while it is in use
    _position: Node  # the program that this object represents in the autograd graph
    _own: Node | None  # the tensor that was built from this object, behind it in the graph
    _writes: int  # how often they had been written to when they got that position
    _stale: bool  # written to since, so that their node raises until they are recorded again
    _passed: bool  # whether results joined the graph without passing through this object
    _level: int  # of the torch.func transform whose tensors are behind it; 0 outside of any
    max_bytes: int | None

    # Tensors are hashed by identity.
    __hash__ = Tensor.__hash__

    @classmethod
    def of(cls, scores: Scores, lead: torch.Size, dtype: torch.dtype) -> LazyLogits:
        """Make the logits of a head that was called on hidden states (*lead, D)."""
        shape = (*lead, scores.vocab_size)
        if not torch._C._are_functorch_transforms_active():
            if torch.is_grad_enabled() and any(t.requires_grad for t in scores.tensors()):
                return cls._joined(scores, shape, dtype)
            # Constants for ever, also if a tensor requires a gradient later.
            scores = scores.with_tensors([t.detach() for t in scores.tensors()])
        return wrap(Leaf(Root(scores), dtype), shape, dtype, scores.device, scores.max_bytes)

    @classmethod
    def _joined(cls, scores: Scores, shape: tuple[int, ...], dtype: torch.dtype) -> LazyLogits:
        """Make logits that take part in the autograd graph."""
        root = Root(scores)
        node = Leaf(root, dtype)

        def make() -> tuple[Tensor, Tensor]:
            handle = Tensor._make_wrapper_subclass(
                routing.Handle, (), dtype=dtype, device=scores.device
            )
            return wrap(node, shape, dtype, scores.device, scores.max_bytes), handle

        logits, root.handle = routing.enter(root, make)
        assert isinstance(logits, LazyLogits)
        return logits

    # What is behind it ---------------------------------------------------------------------------

    @property
    def node(self) -> Node:
        """The program, over rows (N, V), with all in-place changes so far."""
        if self._seen[0] != self._shared.version:
            node = self._shared.node
            for view in self._chain:
                node = view.of(node)
            self._seen = (self._shared.version, node)
        return self._seen[1]

    @property
    def part(self) -> Node:
        """The program as part of another: through this object, if autograd must pass through it."""
        build_foreign(self)
        base, node = self._shared, self.node
        recorded = torch.is_grad_enabled() and plain(self, "requires_grad")
        if recorded and node is not self._own and not self._is_bypassed():
            return self.through()
        self._passed |= recorded and node is not self._own
        if base.exposed:
            return self._now()
        if not torch.is_grad_enabled():
            node = self._live_node()
        if base.memory is None and not base.built:
            return node
        base.recorded = True
        return stamped(node, copy=base.shared)

    def through(self) -> Node:
        """Return the program as part of another, with its gradient through this object."""
        live = self._live_node()
        if not torch.is_grad_enabled():
            return live
        if not plain(self, "requires_grad"):
            return self.node
        if live is not self._position:
            if not self._shared.untouched(self._writes):
                raise routing.written_elsewhere()
            live = self._position
        made = None if self._through is None else self._through()
        if made is None or made.root.node is not live:
            # A copy keeps the place in the graph if this object is modified in place.
            with torch._C.DisableTorchFunctionSubclass():
                handle = self.clone()
            made = Leaf(Root(node=live, handle=handle), plain(self, "dtype"))
            self._through = weakref.ref(made)  # one root for all parts of a question
        return made

    def behind(self) -> Node:
        """Return what a tensor that is built from this object is computed from."""
        written = self._shared.writes != self._writes
        return self.node if written and self._is_bypassed() else self.through()

    def _is_bypassed(self) -> bool:
        """Whether results join the graph at what is behind this object."""
        return self._is_foreign() or routing.can_bypass(self)

    def _is_foreign(self) -> bool:
        """Whether this is the output of another autograd function, and was built."""
        foreign = self._shared.foreign
        return foreign is not None and foreign() is self and not routing.has_own_node(self)

    def check_position(self) -> None:
        """Raise if autograd has these logits in its graph as they were before a write."""
        written = self._shared.writes != self._writes
        if written and torch.is_grad_enabled() and plain(self, "requires_grad"):
            raise routing.written_elsewhere()

    def _now(self) -> Node:
        """Return the program with a copy of the rows in memory, which others may write to."""
        node = self._shared.read(seen_rows(self), copy=True)
        for view in self._chain:
            node = view.beyond_rows(node)
        return node

    def _live_node(self) -> Node:
        if self._live is not None and self._live[0] == self._shared.version:
            return self._live[1]
        return self.node

    @property
    def lead(self) -> torch.Size:
        """The shape without the vocabulary."""
        shape = tuple(plain(self, "shape"))
        return torch.Size(shape[: self._vdim] + shape[self._vdim + 1 :])

    def scores(self) -> Scores:
        """Return the logits as `Scores` of rows (N, V), as constants: what decoding reads."""
        node = self.node
        check_unchanged([node])
        with torch.no_grad():
            env = current([node])
            found = node.scores(env)
            if found is not None:
                return found
            (rows,) = replay([node], lambda tiles, *_: (tiles[0],), env, max_bytes=self.max_bytes)
        return DenseScores(rows, self.max_bytes)

    # Description ---------------------------------------------------------------------------------

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        state = "dense" if isinstance(self._shared.node, Dense) else "not computed"
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {state})"

    def _repr_html_(self) -> str:
        rows = [
            ("shape", str(tuple(self.shape))),
            ("dtype", str(self.dtype)),
            ("state", "dense" if isinstance(self._shared.node, Dense) else "not computed"),
            ("recorded operations", _recorded(self.node) or "none"),
            ("bytes, if built", self.numel() * self.element_size()),
        ]
        return html_table("LazyLogits", ["", ""], rows)

    def explain(self) -> str:
        """Describe the cost of a question before it is computed: products, tiles, bytes."""
        size = self.numel() * self.element_size()
        node = self.node
        lines = [f"  recorded operations     {_recorded(node)}"] if _recorded(node) else []
        for part in node.walk():
            if isinstance(part, Leaf) and part.root.scores is not None:
                lines += part.now.explain()
        return "\n".join(
            [repr(self), *lines, f"  building it             {size:,} bytes that stay"]
        )

    # Questions -----------------------------------------------------------------------------------

    @eager
    def ask(self, **questions: Any) -> Answers:
        """Answer the questions of `lmhead.query` about these logits.

        >>> from lmhead import LMHead
        >>> logits = LMHead(16, 100)(torch.randn(4, 16))
        >>> answers = logits.ask(entropy=True, top_k=5)
        >>> answers.entropy.shape, answers.top_k.indices.shape
        (torch.Size([4]), torch.Size([4, 5]))
        """
        return ask(self, **questions)

    def mask_tokens(self, bitmask: Tensor) -> LazyLogits:
        """Return the logits with -inf where a mask is False, or a bit of it is 0.

        Args:
            bitmask: bool, (V,) or (..., V); or int32, (rows, ceil(V / 32)) or (ceil(V / 32),),
                bit i % 32 of entry i // 32 for token i, as xgrammar, llguidance and outlines-core
                write it. Tokens beyond its end are forbidden.
        """
        made: LazyLogits = HANDLER[0](LazyLogits.mask_tokens, (self, bitmask), {})
        return made

    def materialize(self) -> Tensor:
        """Build the tensor (..., V), with memory of its own; warns once, with its size."""
        return self.build("materialize()")

    def build(self, what: str) -> Tensor:
        """Return a tensor of its own, kept for the next time; `what` builds it, in the warning."""
        built, now = self._built, self._shared.version
        stale = built is None or built[0] != now or version(built[1]) != built[2]
        if built is not None and torch.is_grad_enabled() and not built[1].requires_grad:
            stale |= plain(self, "requires_grad")  # built under no_grad
        if built is None or stale or self._shared.exposed or self._shared.built:
            # What torch's functions build is behind this object: hooks may be attached later.
            behind = what != "materialize()" and not self._shared.exposed
            node = self.behind() if behind else self.part
            tensor = build_rows(node, self, what, self.lead).movedim(-1, self._vdim)
            built = self._built = (now, tensor, version(tensor))
        return built[1]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer one of torch's functions; see `torch_function`."""
        return HANDLER[0](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer a call that did not come through Python, on the tensor."""
        return DISPATCHER[0](func, args, kwargs or {})


# Set by `torch_function`, which needs this class: what answers torch's functions.
HANDLER: list[Callable[..., Any]] = []
DISPATCHER: list[Callable[..., Any]] = []


def plain(logits: Tensor, name: str) -> Any:
    """Read an attribute of the tensor itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return getattr(logits, name)


def wrap(
    node: Node,
    shape: Any,
    dtype: torch.dtype,
    device: torch.device,
    max_bytes: int | None,
    *,
    vdim: int | None = None,
    strides: tuple[int, ...] | None = None,
    base: Base | None = None,
    chain: tuple[View, ...] = (),
) -> LazyLogits:
    """Return an object for a program, without a place in the autograd graph.

    `strides` are those the tensor would have; None if it would be contiguous.
    """
    made = Tensor._make_wrapper_subclass(
        LazyLogits, shape, strides=strides, dtype=dtype, device=device
    )
    # C++ code that asks for its memory gets an error instead of no pointer.
    torch._C._set_throw_on_mutable_data_ptr(made)
    made._chain, made.max_bytes = chain, max_bytes
    made._vdim = len(shape) - 1 if vdim is None else vdim
    lead = torch.Size([*shape[: made._vdim], *shape[made._vdim + 1 :]])
    made._shared = Base(node, lead) if base is None else base
    # A program with a snapshot of memory must not be cached.
    made._seen = (-1 if made._shared.exposed else made._shared.version, node)
    made._live = None
    made._built = made._through = made._own = None
    made._level = _transform_level(node)
    note_position(made, node)
    return made


def _transform_level(node: Node) -> int:
    """Return the level of the innermost torch.func transform that a program depends on."""
    if not torch._C._are_functorch_transforms_active():
        return 0
    tensors: list[Tensor] = []
    for part in node.walk():
        if isinstance(part, Operand):
            tensors.append(part.tensor)
        elif isinstance(part, Leaf) and part.root.scores is not None:
            tensors += part.root.scores.tensors()
    return max([0, *(torch._C._functorch.maybe_get_level(t) for t in tensors)])


def check_transform(logits: LazyLogits) -> None:
    """Raise if these logits have left the torch.func transform that they were made in."""
    if logits._level == 0 or logits._level <= (torch._C._functorch.maybe_current_level() or 0):
        return
    raise left_transform()


def left_transform() -> RuntimeError:
    """Return the error of lazy logits as a result of a function that torch.func transforms."""
    return RuntimeError(
        "a function inside torch.func.grad, vjp, jacrev or vmap cannot return lazy logits; return "
        "logits.materialize()"
    )


def derived(
    like: LazyLogits,
    node: Node,
    shape: Any,
    dtype: torch.dtype,
    *,
    vdim: int | None = None,
    view: View | None = None,
    strides: tuple[int, ...] | None = None,
) -> LazyLogits:
    """Return the object for a program made from `like`; a view of it if `view` is given."""
    device, max_bytes = plain(like, "device"), like.max_bytes
    base: Base | None = None
    chain: tuple[View, ...] = ()
    live: Node | None = None
    smooth = dtype.is_floating_point or dtype.is_complex
    if not smooth:
        node = node.frozen()
    if not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        live, node = node, node.frozen()
        if view is not None and plain(like, "requires_grad"):
            base, chain = like._shared, (*like._chain, view, Detached())
    elif view is not None:
        base, chain = like._shared, (*like._chain, view)
    if view is not None and base is None:
        base, chain = like._shared, (*like._chain, view)

    def make() -> LazyLogits:
        return wrap(
            node,
            shape,
            dtype,
            device,
            max_bytes,
            vdim=vdim,
            strides=strides,
            base=base,
            chain=chain,
        )

    made = routing.record(node, make) if smooth else make()
    assert isinstance(made, LazyLogits)
    if live is not None and not made._shared.exposed:
        made._live, made._position = (made._shared.version, live), live
    return made


def lead_layout(logits: LazyLogits) -> tuple[Tensor, int]:
    """Return a tensor (*lead, 1) without memory, and the unit its strides are counted in."""
    lead = [d for d in range(logits.dim()) if d != logits._vdim]
    unit = max(1, math.gcd(*(logits.stride(d) for d in lead)))
    strides = [logits.stride(d) // unit for d in lead]
    return torch.empty_strided((*logits.lead, 1), (*strides, 1), device="meta"), unit


def like_strided(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> tuple[int, ...]:
    """Return the strides of a pointwise function's result, from those of its arguments."""

    def layout(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")

    with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        made = function(*map(layout, args), **{k: layout(v) for k, v in kwargs.items()})
        return tuple(made.stride())


def note_position(logits: LazyLogits, node: Node) -> None:
    """Note the program that an object represents in the autograd graph."""
    logits._position, logits._writes, logits._passed = node, logits._shared.writes, False
    logits._stale = False
    logits._shared.objects[id(logits)] = logits


def token_range(node: Node, tokens: slice) -> Node:
    """Return a range of the vocabulary."""
    if isinstance(node, Leaf):
        part = node.stepped("token_range", tokens)
        if part is not None:
            return part
    return Call(_tokens, (node, tokens), {}, node.n_rows, len(range(node.width)[tokens]))


def _tokens(tile: Tensor, tokens: slice) -> Tensor:
    return tile[:, tokens]


def _put_tokens(tile: Tensor, part: Tensor, tokens: slice) -> Tensor:
    return tile.slice_scatter(part.to(tile.dtype), 1, tokens.start, tokens.stop, tokens.step or 1)


def put_rows(node: Node, rows: Rows, part: Node, *, twice: bool = False) -> Node:
    """Return the program with some rows replaced; `twice`: a row may be given more than once."""
    index = index_of(rows, node.n_rows)
    lookup = torch.full((node.n_rows,), -1, dtype=torch.int64)
    lookup[index] = torch.arange(len(index))
    if not twice and len(index) != int((lookup >= 0).sum()):
        raise RuntimeError(
            "unsupported operation: more than one entry of the logits refers to the same memory; "
            "clone() before the in-place operation"
        )
    if len(index) == node.n_rows and bool((lookup >= 0).all()):
        return part if torch.equal(index, torch.arange(len(index))) else part.take(lookup)
    return Overlay.of(node, lookup, part)


def seen_rows(logits: LazyLogits) -> Tensor | None:
    """Return the rows of the base that the logits show; None for all, in their order."""
    rows = None
    for view in logits._chain:
        if view.rows is not None:
            rows = torch.arange(logits._shared.program.n_rows) if rows is None else rows
            rows = rows[view.rows]
    return rows


def is_tensor_now(logits: LazyLogits) -> bool:
    """Return whether the logits were built and share their memory with tensors outside."""
    base = logits._shared
    if base.shared:
        return True
    memory = base.memory
    if memory is None or not memory.outside or not base.constant:
        return False
    rows = seen_rows(logits)
    return bool((memory.filled if rows is None else memory.filled[rows]).all())


def build_rows(node: Node, logits: LazyLogits, what: str, lead: torch.Size) -> Tensor:
    """Compute all rows of a program of these logits, with a warning: (*lead, V)."""
    shape, dtype = (*lead, node.width), plain(logits, "dtype")
    warn(what, shape, dtype, constant=not plain(logits, "requires_grad"))
    return build(node, dtype, logits.max_bytes).reshape(shape)


def build_foreign(logits: LazyLogits) -> None:
    """Build logits that another autograd function made, and returned as its output.

    Its node of the graph expects the gradient of every entry: the gradients of the tensors behind
    the logits are already differentiated by what the function did to them. A function that
    returns the logits as they were given (of DDP, of a module hook) takes either.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if not logits.requires_grad or logits._is_foreign() or routing.has_own_node(logits):
            return
    node = logits._live_node()
    if routing.differentiable([node]) and routing.is_passed_on(logits, node):
        return  # answers know how to reach the tensors behind it
    shape = (*logits.lead, node.width)
    dtype, max_bytes = plain(logits, "dtype"), logits.max_bytes
    warn("an autograd function", shape, dtype, constant=False)
    with torch.inference_mode(False), torch.enable_grad():
        rows = routing.join(logits, logits._vdim, lambda: values(node, dtype, max_bytes))
        tensor = rows.view(shape)
    base = logits._shared = Base(Dense.of(tensor), logits.lead)
    base.foreign = weakref.ref(logits)
    base.built.append((tensor, version(tensor)))
    logits._chain, logits._live, logits._own = (), None, base.program
    logits._seen = (base.version, base.program)
    note_position(logits, base.program)


def _recorded(node: Node) -> str:
    names = [part.name.strip("_") for part in node.walk() if isinstance(part, Call)]
    return ", ".join(dict.fromkeys(reversed(names)))
