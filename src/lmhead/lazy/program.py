"""Programs: what has been done to logits so far, recorded instead of computed.

A program is a tree of nodes over (rows, tokens). Its leaves are `Scores` of a head or dense
tensors; its inner nodes are torch's own functions, recorded. It is evaluated on a few rows at a
time, always over the whole vocabulary, so any function of single rows can be recorded. A loop may
record thousands of operations: what goes down a program is written as `Steps`, without recursion.

Row indices refer to the rows of a node, counted over its flattened leading dimensions. A node never
changes; an in-place operation makes a new one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import GeneratorType
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, final

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes
from typing_extensions import Self

from lmhead.checks import has_memory
from lmhead.parallel import fsdp
from lmhead.scores import DenseScores, Scores
from lmhead.scores.protocol import Rows

T = TypeVar("T")
Steps: TypeAlias = T | Generator[Any, Any, T]
"""A value, or a generator that returns it. The generator yields other steps, and is sent their
values."""


def run(steps: Steps[T]) -> T:
    """Return the value of steps, with a stack that is as deep as needed."""
    if not isinstance(steps, GeneratorType):
        return steps  # type: ignore[return-value]
    stack: list[Any] = [steps]
    value: Any = None
    while stack:
        try:
            value = stack[-1].send(value)
        except StopIteration as done:  # noqa: PERF203
            stack.pop()
            value = done.value
        else:
            if isinstance(value, GeneratorType):
                stack.append(value)
                value = None
    return value  # type: ignore[no-any-return]


class Root:
    """Scores at the place where they enter the autograd graph.

    Attributes:
        scores: the scores on the tensors of the head, or None if `node` is given.
        node: the program behind an object whose gradient must pass through that object itself,
            because hooks or other autograd functions are attached to it.
        handle: the tensor that represents the scores in the graph; None for constants, and where
            autograd follows the head's tensors directly (inside `torch.func` transforms).
    """

    def __init__(
        self,
        scores: Scores | None = None,
        node: Node | None = None,
        handle: Tensor | None = None,
    ) -> None:
        self.scores, self.node, self.handle = scores, node, handle
        self._origin: Root | None = None  # not itself: a cycle would keep the tensors
        self.waiting: Any = None  # gradients not yet taken: see `routing`
        if scores is not None:
            self._sharded: list[Any] | None = None  # per tensor; None for none of them
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                self._sharded = [fsdp.sharded_parameter(t) for t in scores.tensors()]
            self._versions = self._states(scores)

    @property
    def origin(self) -> Root:
        """For constants, the root with the same values that has gradients."""
        return self if self._origin is None else self._origin

    def without_handle(self) -> Root:
        """Return the same scores without a place in the graph."""
        made = Root.__new__(Root)
        made.__dict__.update(self.__dict__, handle=None)
        return made

    def check_unchanged(self) -> None:
        """Raise if a tensor of the head was modified in place since the head was called."""
        if self.scores is None:
            check_unchanged([self.node] if self.node is not None else [])
            return
        states = self._states(self.scores)
        if states == self._versions:
            return
        for now, name, then in zip(states, self.scores.tensor_names(), self._versions, strict=True):
            if now != then:
                raise RuntimeError(
                    f"the {name} of these lazy logits was modified in place after the head was "
                    "called, so its logits can no longer be computed. Ask before the update (an "
                    "optimizer step, load_state_dict), call the head again, or use .materialize() "
                    "before it"
                )

    def _states(self, scores: Scores) -> list[Any]:
        tensors, names = scores.watched(), scores.tensor_names()
        if self._sharded is None:
            return list(map(_state, tensors, names))
        return [
            _state(t, name) if s is None else (version(t), version(s.parameter))
            for t, name, s in zip(tensors, names, self._sharded, strict=True)
        ]

    def gathered(self) -> tuple[Tensor, ...] | None:
        """Return the head's tensors if FSDP2 has freed some: those, gathered again; else None."""
        if self._sharded is None:
            return None
        tensors = self.own.tensors()
        freed = [
            s is not None and fsdp.is_freed(t) for t, s in zip(tensors, self._sharded, strict=True)
        ]
        if not any(freed):
            return None
        pairs = zip(tensors, self._sharded, freed, strict=True)
        return tuple(s.gather(t) if s is not None and gone else t for t, s, gone in pairs)

    def bind(self, env: Env) -> Scores:
        """Return the scores on the tensors of `env`; not for a root with a program."""
        logits = env.stand_in(self)
        if logits is not None:
            return DenseScores(logits)
        tensors = env.root_tensors(self)
        return self.own if tensors is None else self.own.with_tensors(tensors)

    @property
    def own(self) -> Scores:
        """The scores on the tensors of the head; not for a root with a program."""
        if self.scores is None:
            raise AssertionError("this root has a program, not scores")
        return self.scores

    def detached(self) -> Root:
        """Return the same scores as constants."""
        if self.node is not None:
            fixed = Root(node=self.node.frozen())
            fixed._origin = self.origin
            return fixed
        scores = self.own
        if self.handle is None and not any(t.requires_grad for t in scores.tensors()):
            return self
        fixed = Root(scores.with_tensors([t.detach() for t in scores.tensors()]))
        fixed._sharded, fixed._versions = self._sharded, self._versions
        fixed._origin = self.origin
        return fixed


def version(t: Tensor) -> int | None:
    """Return how many in-place changes torch has counted; None where it counts none."""
    return None if t.is_inference() else t._version


def _state(t: Tensor, name: str) -> Any:
    """Return what changes when a tensor is written to, or its data replaced."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(t)
    if type(t) not in (Tensor, torch.nn.Parameter) or wrapped:
        return version(t)
    return version(t), t.data_ptr(), _sample(t) if name in _PARAMETERS else None


# Of these a sample is compared: optimizers, averages and merged adapters write to `.data`, which
# torch does not count.
_PARAMETERS = ("weight", "low_rank_b", "bias")
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def _sample(t: Tensor) -> bytes | None:
    """Return some entries; None if the tensor cannot be read."""
    if not t.is_cpu or t.is_quantized:
        return None
    # Asked of the weight for every answer: the usual case must be fast.
    held = t.untyped_storage().nbytes() - t.storage_offset() * t.element_size()
    if not (t.is_contiguous() and 0 < t.nbytes <= held and t.data_ptr()) and not has_memory(t):
        return None
    if torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack():
        with torch._C._DisableFuncTorch(), _disable_current_modes():
            return _few_entries(t)
    return _few_entries(t)


def _few_entries(t: Tensor) -> bytes:
    numbers = t.detach().view(_INTEGERS[t.element_size()])
    some = numbers[tuple([slice(None, None, n // 8 or 1) for n in t.shape])]
    # A copy: NumPy's view of a tensor forbids for ever that its storage is resized, as FSDP does.
    return some.clone().numpy().tobytes()


class Env:
    """Substitutes for the tensors of a program while it is evaluated, and what was computed."""

    def __init__(
        self,
        roots: dict[Root, tuple[Tensor, ...]] | None = None,
        tensors: dict[int, Tensor] | None = None,
        scopes: dict[Root, Env] | None = None,
        stand_ins: dict[Root, Tensor] | None = None,
    ) -> None:
        self._roots, self._tensors, self._scopes = roots or {}, tensors or {}, scopes or {}
        self._stand_ins = stand_ins or {}
        self.bound: dict[Any, tuple[Any, Scores]] = {}
        self.tiles: dict[Any, tuple[Any, Tensor]] = {}
        self.watch: Watch | None = None

    def root_tensors(self, root: Root) -> tuple[Tensor, ...] | None:
        """Return what takes the place of a root's tensors; None for the tensors themselves."""
        return self._roots.get(root)

    def stand_in(self, root: Root) -> Tensor | None:
        """Return dense logits (N, V) to be used instead of a root, if there are any."""
        return self._stand_ins.get(root)

    def with_stand_in(self, root: Root, logits: Tensor) -> Env:
        """Return the same environment, with dense logits instead of a root."""
        return Env(self._roots, self._tensors, self._scopes, {root: logits})

    def tensor(self, t: Tensor) -> Tensor:
        """Return what takes the place of a tensor that entered the program."""
        return self._tensors.get(id(t), t)

    def scope(self, root: Root) -> Env:
        """Return the environment of the program behind a root."""
        if root not in self._scopes:
            self._scopes[root] = Env()
        return self._scopes[root]

    def start(self, watch: Watch | None = None) -> None:
        """Forget computed rows, here and behind roots; let `watch` provide inputs from now on."""
        self.tiles.clear()
        self.watch = watch
        for inner in self._scopes.values():
            inner.start(watch)


class Watch(Protocol):
    """What provides tiles of scores and rows of operands as inputs of an autograd graph."""

    def tile(self, leaf: Leaf, env: Env, first: int, last: int) -> Tensor:
        """Return rows of a leaf."""
        ...

    def rows(self, tensor: Tensor, flat: Tensor, rows: Any) -> Tensor:
        """Return flat[rows] of a tensor."""
        ...


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor that entered a program: a scalar, or (n or 1, V or 1) with an index of its rows.

    Row i of the program uses row index[i] of the tensor, or row i if there is no index.
    """

    tensor: Tensor
    width: int  # size of the last dimension; 0 for a scalar
    index: Tensor | None = None
    per_row: bool = False
    version: int | None = None

    @classmethod
    def of(cls, tensor: Tensor, lead: torch.Size) -> Operand:
        """Take a tensor whose leading dimensions broadcast to `lead`."""
        if tensor.is_inference():
            tensor = tensor.clone()  # torch would not count changes to it
        elif not tensor.requires_grad and not torch._C._are_functorch_transforms_active():
            tensor = tensor.detach()  # a constant, also if it requires a gradient later
        now = version(tensor)
        if tensor.dim() == 0:
            return cls(tensor, 0, version=now)
        own, width = tensor.shape[:-1], tensor.shape[-1]
        if own.numel() == 1:
            return cls(tensor, width, version=now)
        if own == lead:
            return cls(tensor, width, per_row=True, version=now)
        places = torch.arange(own.numel(), device=tensor.device).view(own)
        index = places.expand(lead).reshape(-1)
        return cls(tensor, width, index, per_row=True, version=now)

    def check_unchanged(self) -> None:
        """Raise if the tensor was modified in place since it entered the program."""
        if self.version is not None and version(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that was combined with lazy logits "
                "was modified in place before the result was computed. Clone it first, or use "
                ".materialize() before the change"
            )

    def take(self, rows: Rows) -> Operand:
        """Return the operand of some of the rows."""
        if not self.per_row:
            return self
        if self.index is not None:
            return replace(self, index=self.index[rows])
        if isinstance(rows, slice):
            n = self.tensor.shape[:-1].numel()
            rows = torch.arange(n, device=self.tensor.device)[rows]
        return replace(self, index=rows.to(self.tensor.device))

    def dense(self, env: Env, first: int, last: int) -> Tensor:
        """Return rows [first, last), (B or 1, V or 1); a scalar as it is."""
        t = env.tensor(self.tensor)
        if t.dim() == 0:
            return t if env.watch is None else env.watch.rows(t, t, None)
        flat, rows = t.reshape(t.shape[:-1].numel(), self.width), None
        if self.per_row:
            rows = slice(first, last) if self.index is None else self.index[first:last]
        if env.watch is not None:
            return env.watch.rows(t, flat, rows)
        return flat if rows is None else flat[rows]

    def frozen(self) -> Operand:
        """Return the operand as a constant."""
        if not self.tensor.requires_grad:
            return self
        return replace(self, tensor=self.tensor.detach())


class Node(ABC):
    """Values of shape (n_rows, width), not computed.

    A subclass is a dataclass. Nodes and operands among its fields, also in a tuple or a dictionary,
    are its parts.
    """

    n_rows: int
    width: int
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def parts(self) -> Sequence[Node | Operand]:
        """Return what the node is made of."""
        if "_parts" not in self.__dict__:
            found: list[Node | Operand] = []
            self._fields(found.append)
            self.__dict__["_parts"] = found
        return self.__dict__["_parts"]  # type: ignore[no-any-return]

    def _fields(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        """Return the fields, with `change` applied to the parts among them."""
        return {n: _changed(getattr(self, n), change) for n in self.__dataclass_fields__}

    def map(self, change: Callable[[Any], Steps[Any]], **fields: Any) -> Steps[Self]:
        """Change each of the parts, and some fields; return this node if nothing changes."""
        made, parts = {}, self.parts()
        for part in parts:
            made[id(part)] = yield change(part)
        if not fields and all(made[id(part)] is part for part in parts):
            return self
        return replace(self, **{**self._fields(lambda part: made[id(part)]), **fields})

    @abstractmethod
    def compute(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Compute rows [first, last): (B, width)."""

    # A part may be used many times: without these memories each use would be another copy of it,
    # and of all below it.
    @final
    def take(self, rows: Rows) -> Node:
        """Return some of the rows; the same node if asked again for the same rows."""
        return run(self.taken(rows))

    @final
    def taken(self, rows: Rows) -> Steps[Node]:
        """Return the steps that compute `take(rows)`."""
        if _is_all(rows, self.n_rows):
            return self
        known: dict[Any, tuple[Rows, Node]] = self.__dict__.setdefault("_taken", {})
        key = _row_key(rows)
        found = known.get(key)
        if found is None:
            found = rows, (yield self._take(rows))
            if len(known) >= _TAKEN:  # another thread may change it meanwhile
                known.pop(next(iter(list(known)), None), None)
            known[key] = found
        return found[1]

    @final
    def frozen(self) -> Node:
        """Return the same values as constants; the same node if asked again."""
        return run(self._constant())

    def _constant(self) -> Steps[Node]:
        if "_frozen" not in self.__dict__:
            made = yield self._freeze()
            made.__dict__["_frozen"] = None  # the node itself: a reference would be a cycle
            if made is not self:
                self.__dict__["_frozen"] = made
        found: Node | None = self.__dict__["_frozen"]
        return self if found is None else found

    def _take(self, rows: Rows) -> Steps[Node]:
        """Take the rows of parts that have as many."""
        return self.map(
            lambda part: part.taken(rows) if isinstance(part, Node) else part.take(rows),
            n_rows=count(rows, self.n_rows),
        )

    def _freeze(self) -> Steps[Node]:
        return self.map(lambda part: part._constant() if isinstance(part, Node) else part.frozen())

    live: float = 1.0
    """How many (rows, tokens) tensors the node itself needs for a row, about."""

    def key(self) -> Any:
        """Return what identifies the values: nodes with equal keys are computed once."""
        return id(self)

    @final
    def dense(self, env: Env, first: int, last: int) -> Tensor:
        """Return rows [first, last), computed once for all that use them."""
        return run(self.tile(env, first, last))

    def tile(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Return the steps of `dense`."""
        key = (self.key(), first, last)
        if key not in env.tiles:
            env.tiles[key] = (self, (yield self.compute(env, first, last)))
        return env.tiles[key][1]

    def scores(self, env: Env) -> Scores | None:  # noqa: ARG002
        """Return the values as `Scores`, if they are those of a head or a tensor."""
        return None

    @property
    def is_scores(self) -> bool:
        """Whether `scores` returns any."""
        return False

    def bound(self, env: Env) -> Scores:
        """Return the values as `Scores`, which they must be."""
        found = self.scores(env)
        if found is None:
            raise AssertionError("this program is not scores")
        return found

    @property
    def sources(self) -> tuple[Sequence[Root], Sequence[Operand]]:
        """The distinct roots and operands of the program."""
        return run(self._find_sources())

    def _find_sources(self) -> Steps[tuple[Sequence[Root], Sequence[Operand]]]:
        if "_sources" not in self.__dict__:
            roots: dict[Root, None] = {}
            operands: dict[Operand, None] = {}
            for part in self.parts():
                if isinstance(part, Operand):
                    operands[part] = None
                else:
                    found = yield part._find_sources()
                    roots.update(dict.fromkeys(found[0]))
                    operands.update(dict.fromkeys(found[1]))
            self.__dict__["_sources"] = tuple(roots), tuple(operands)
        return self.__dict__["_sources"]

    def walk(self) -> Iterator[Node | Operand]:
        """Yield this node, and all nodes and operands below it, each of them once."""
        seen: set[int] = set()
        waiting: list[Node | Operand] = [self]
        while waiting:
            part = waiting.pop()
            if id(part) in seen:
                continue
            seen.add(id(part))
            yield part
            if isinstance(part, Node):
                waiting.extend(reversed(part.parts()))


_TAKEN = 8  # selections of rows that a node remembers
_COMPARED = 4096  # rows of a selection that is recognised by its entries


def _row_key(rows: Rows) -> Any:
    """Return what identifies a selection of rows while it exists."""
    if isinstance(rows, slice):
        return rows.start, rows.stop, rows.step
    transformed = torch._C._are_functorch_transforms_active() or type(rows) is not Tensor
    if transformed or not rows.is_cpu or len(rows) > _COMPARED:
        return id(rows)
    return rows.numpy().tobytes()


def _is_all(rows: Rows, n: int) -> bool:
    """Whether a selection has all of n rows, in their order."""
    if isinstance(rows, slice):
        return range(n)[rows] == range(n)
    return len(rows) == n and torch.equal(rows, torch.arange(n, device=rows.device))


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a field of a node, with `change` applied to the parts in it."""
    if isinstance(value, Node | Operand):
        return change(value)
    if type(value) is tuple:
        return tuple([_changed(v, change) for v in value])
    return {k: _changed(v, change) for k, v in value.items()} if type(value) is dict else value


@dataclass(frozen=True, eq=False)
class Leaf(Node):
    """Scores of a head, with the operations that were folded into them.

    `steps` are calls of `Scores` methods, (name, argument), in order.
    """

    root: Root
    dtype: torch.dtype
    steps: tuple[tuple[str, Any], ...] = ()
    _fixed: list[Scores] = field(default_factory=list, repr=False)

    @cached_property
    def n_rows(self) -> int:  # type: ignore[override]
        """N."""
        return self._node.n_rows if self._node is not None else self.now.n_rows

    @cached_property
    def width(self) -> int:  # type: ignore[override]
        """V."""
        return self._node.width if self._node is not None else self.now.vocab_size

    @property
    def root_rows(self) -> int:
        """The number of rows that the head was called on."""
        root = self.root
        return root.scores.n_rows if root.scores is not None else self.n_rows

    @property
    def _node(self) -> Node | None:
        """The program behind the root, if it has one that is not scores."""
        return None if self.root.node is None else self._selected

    @cached_property
    def _selected(self) -> Node:
        """The rows of the program behind the root."""
        node = self.root.node
        assert node is not None
        assert all(name == "select" for name, _ in self.steps)
        for _, rows in self.steps:
            node = node.take(rows)
        return node

    @property
    def now(self) -> Scores:
        """The scores on the head's own tensors, without gradients."""
        if not self.steps:
            return self.root.own
        if not self._fixed:
            with torch.no_grad():
                self._fixed.append(self._bind(Env()))
        return self._fixed[0]

    def _bind(self, env: Env) -> Scores:
        scores = self.root.bind(env)
        for name, argument in self.steps:
            given = env.tensor(argument) if isinstance(argument, Tensor) else argument
            scores = scores.select(given) if name == "select" else _step(scores, name, given)
        return scores

    def scores(self, env: Env) -> Scores | None:
        """Return the scores on the tensors of `env`, after all steps."""
        if self._node is not None and env.stand_in(self.root) is None:
            return self._node.scores(env.scope(self.root))
        key = self.key()
        if key not in env.bound:
            own = env.root_tensors(self.root) is None and env.stand_in(self.root) is None
            constant = own and not torch.is_grad_enabled()
            env.bound[key] = (self, self.now if constant else self._bind(env))
        return env.bound[key][1]

    @property
    def is_scores(self) -> bool:
        """Whether they are those of a head, not of a program behind the root."""
        return self._node is None or self._node.is_scores

    def stepped(self, name: str, argument: Any = None) -> Leaf | None:
        """Return the leaf after one more step; None if the scores have no such shortcut."""
        if self.root.node is not None:
            return None
        with torch.no_grad():
            method = getattr(self.now, name)
            after = method() if argument is None else method(argument)
        if after is None:
            return None
        return Leaf(self.root, self.dtype, (*self.steps, (name, argument)), [after])

    def cast(self, dtype: torch.dtype) -> Leaf:
        """Return the same scores in another dtype."""
        return Leaf(self.root, dtype, self.steps, self._fixed)

    def key(self) -> Any:
        """Return root, dtype and steps."""
        steps = tuple((n, id(a) if isinstance(a, Tensor) else _hashable(a)) for n, a in self.steps)
        return (id(self.root), self.dtype, steps)

    def values(self) -> Any:
        """Return what identifies the values, whether they are constants or not."""
        return (id(self.root.origin), *self.key()[1:])

    @property
    def is_constant(self) -> bool:
        """Whether it has no gradient though its root's origin may have one."""
        return self.root.origin is not self.root and not self._has_learned_steps

    @property
    def _has_learned_steps(self) -> bool:
        return any(isinstance(a, Tensor) and a.requires_grad for _, a in self.steps)

    def tile(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Return rows [first, last), computed once for the scores and for them as constants."""
        if self.is_constant:
            key = (self.values(), first, last)
            if key not in env.tiles:
                env.tiles[key] = (self, (yield self.compute(env, first, last)).detach())
            return env.tiles[key][1]
        key = (self.key(), first, last)
        if (key, "graph") not in env.tiles:
            made = yield self.compute(env, first, last)
            env.tiles[key, "graph"] = (self, made)
            env.tiles[key] = (self, made.detach())
        return env.tiles[key, "graph"][1]

    def parts(self) -> list[Operand]:
        """Return the tensors of the steps."""
        return [
            Operand(a, 0)
            for name, a in self.steps
            if isinstance(a, Tensor) and a.is_floating_point()
        ]

    def _find_sources(self) -> tuple[Sequence[Root], Sequence[Operand]]:
        return [self.root], self.parts()

    @property
    def live(self) -> float:  # type: ignore[override]
        """The product, a map of it, a copy in another dtype."""
        return 3.0 if self._node is None else 1.0 + live_tensors([self._node])

    def compute(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Compute rows [first, last)."""
        if self._node is not None and env.stand_in(self.root) is None:
            return (yield self._node.tile(env.scope(self.root), first, last)).to(self.dtype)
        if env.watch is not None:
            return env.watch.tile(self, env, first, last).to(self.dtype)
        return self.bound(env).select(slice(first, last)).dense().to(self.dtype)

    def _take(self, rows: Rows) -> Leaf:
        return Leaf(self.root, self.dtype, (*self.steps, ("select", rows)))

    def _freeze(self) -> Leaf:
        root = self.root.detached()
        if root is self.root and not self._has_learned_steps:
            return self
        steps = tuple((n, a.detach() if isinstance(a, Tensor) else a) for n, a in self.steps)
        return Leaf(root, self.dtype, steps)


def _step(scores: Scores, name: str, argument: Any) -> Scores:
    method = getattr(scores, name)
    after: Scores = method() if argument is None else method(argument)
    return after


def _hashable(value: Any) -> Any:
    return (value.start, value.stop, value.step) if isinstance(value, slice) else value


@dataclass(frozen=True, eq=False)
class Dense(Node):
    """The rows of a tensor: logits after they were built, or written to through memory."""

    operand: Operand
    n_rows: int
    width: int

    @classmethod
    def of(cls, tensor: Tensor) -> Dense:
        """Take a tensor (..., V)."""
        lead = tensor.shape[:-1]
        per_row = Operand(tensor, tensor.shape[-1], per_row=True)
        return cls(per_row, lead.numel(), tensor.shape[-1])

    def compute(self, env: Env, first: int, last: int) -> Tensor:
        """Return rows [first, last)."""
        return self.operand.dense(env, first, last)

    @property
    def is_scores(self) -> bool:
        """True."""
        return True

    def scores(self, env: Env) -> Scores | None:
        """Return the rows as `DenseScores`."""
        return DenseScores(self.operand.dense(env, 0, self.n_rows))


@dataclass(frozen=True, eq=False)
class Call(Node):
    """A torch function of nodes, operands and constants, row by row.

    `args` and `kwargs` hold nodes and operands in the places of their values.
    """

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    n_rows: int
    width: int
    autocast: torch.dtype | None = None  # autocast's dtype where it was on when recorded

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", "")

    def compute(self, env: Env, first: int, last: int) -> Steps[Tensor]:
        """Call the function on rows [first, last) of its arguments."""
        args = []
        for a in self.args:
            args.append((yield tile(a, env, first, last)))  # noqa: PERF401
        kwargs = {}
        for name, a in self.kwargs.items():
            kwargs[name] = yield tile(a, env, first, last)
        if self.autocast is not None:
            with torch.autocast("cpu", dtype=self.autocast):
                made = self.function(*args, **kwargs)
        else:
            made = self.function(*args, **kwargs)
        return made.expand(last - first, self.width) if made.shape[0] != last - first else made


def tile(value: Any, env: Env, first: int, last: int) -> Steps[Any]:
    """Return rows [first, last) of a node or an operand, and other values as they are."""
    if isinstance(value, Node):
        return value.tile(env, first, last)
    return value.dense(env, first, last) if isinstance(value, Operand) else value


def count(rows: Rows, n: int) -> int:
    """Return how many of n rows are chosen."""
    return len(range(n)[rows]) if isinstance(rows, slice) else len(rows)


def live_tensors(nodes: Sequence[Node]) -> float:
    """Return how many (rows, tokens) tensors exist at once while a row of programs is computed."""
    distinct = {p.key(): p.live for node in nodes for p in node.walk() if isinstance(p, Node)}
    return sum(distinct.values())


def index_of(rows: Rows, n: int) -> Tensor:
    """Return the chosen rows as indices."""
    return torch.arange(n)[rows] if isinstance(rows, slice) else rows


def sources(nodes: Sequence[Node]) -> tuple[list[Root], list[Tensor]]:
    """Return the distinct roots of programs, and the floating tensors that entered them."""
    roots: dict[Root, None] = {}
    tensors: dict[int, Tensor] = {}
    for node in nodes:
        own_roots, operands = node.sources
        roots.update(dict.fromkeys(own_roots))
        smooth = (t for o in operands if (t := o.tensor).is_floating_point() or t.is_complex())
        tensors.update((id(t), t) for t in smooth)
    return list(roots), list(tensors.values())


def current(nodes: Sequence[Node]) -> Env:
    """Return the tensors to use now: weights that FSDP2 has freed are gathered again."""
    return current_roots(sources(nodes)[0])


def current_roots(roots: Sequence[Root]) -> Env:
    """Return the tensors to use now of some roots."""
    by_root: dict[Root, tuple[Tensor, ...]] = {}
    scopes: dict[Root, Env] = {}
    for root in roots:
        if root.node is not None:
            scopes[root] = current([root.node])
        elif (tensors := root.gathered()) is not None:
            by_root[root] = tensors
    return Env(by_root, scopes=scopes)


def check_unchanged(nodes: Sequence[Node]) -> None:
    """Raise if a tensor behind programs was modified in place since it entered them."""
    for node in nodes:
        roots, operands = node.sources
        for operand in operands:
            operand.check_unchanged()
        for root in roots:
            root.check_unchanged()


def gradients(
    pairs: Sequence[tuple[Tensor, Tensor]], tensors: Sequence[Tensor], *, create_graph: bool
) -> list[Tensor | None]:
    """Return the gradients of tensors, from pairs of an output and its gradient.

    A tensor that is there more than once has its gradient at the first place, None at the others.
    """
    wanted = {id(t): t for t in tensors if t.requires_grad}
    if not pairs or not wanted:
        return [None] * len(tensors)
    if len(pairs) == 1 and not create_graph:
        direct = _by_one_node(*pairs[0])
        if direct is not None:
            return [direct.pop(id(t), None) for t in tensors]
    made = torch.autograd.grad(
        [o for o, _ in pairs],
        list(wanted.values()),
        [g for _, g in pairs],
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
    )
    found = dict(zip(wanted, made, strict=True))
    return [found.pop(id(t), None) for t in tensors]


def _by_one_node(output: Tensor, grad: Tensor) -> dict[int, Tensor] | None:
    """Return the gradients of leaves, by their id, if one node leads to all of them; else None.

    Equivalent to: torch.autograd.grad(output, leaves, grad), without the time of a nested pass
    """
    node: Any = output.grad_fn
    if type(node).__base__ is not BackwardCFunction or len(node._input_metadata) != 1:
        return None
    leaves: list[Any] = [getattr(n, "variable", None) for n, _ in node.next_functions if n]
    if any(leaf is None or leaf.dtype.itemsize < 4 for leaf in leaves):
        return None
    if len(set(map(id, leaves))) < len(leaves):  # the engine adds up the gradients of a leaf
        return None
    with torch.no_grad():
        made = node.apply(grad)
    given = (g for g, wanted in zip(made, node.needs_input_grad, strict=True) if wanted)
    pairs = zip(leaves, given, strict=True)
    return {id(t): g.to(t.dtype) for t, g in pairs if g is not None}
