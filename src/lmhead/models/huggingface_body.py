"""A Hugging Face model without its head, as generation and the logit lens want a body.

In:  the inner model of transformers, which ends in hidden states, and its frame: its blocks, and
     its tail, the modules behind the last block (the final norm; a projection in OPT-350m).
Out: hidden states (B, T, D), a cache that is a value, and the layers as the head would see them.

`find_frame` finds the frame by watching the model read one token, so that no family needs an entry
in a list.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class HuggingFaceCache:
    """What transformers remembers of the tokens read so far, as a value.

    Reading on makes a new cache and leaves this one as it is. Keys and values are shared between
    the two until they differ.

    Attributes:
        inner: a cache of transformers, never changed once it is here.
        length: the number of tokens, padding included.
    """

    inner: Any
    length: int

    def select(self, rows: Tensor) -> HuggingFaceCache:
        """The cache of the rows (B',), which may repeat or drop some."""
        chosen = fork(self.inner)
        chosen.reorder_cache(rows)
        return HuggingFaceCache(chosen, self.length)


@dataclass(frozen=True)
class RereadCache:
    """For the few models without a cache of keys and values: the ids so far, read again each time.

    Attributes:
        ids: (B, S).
    """

    ids: Tensor

    @property
    def length(self) -> int:
        """The number S of tokens, padding included."""
        return self.ids.shape[1]

    def select(self, rows: Tensor) -> RereadCache:
        """The cache of the rows (B',), which may repeat or drop some."""
        return RereadCache(self.ids.index_select(0, rows))


def fork(cache: Any) -> Any:
    """A cache that can be written to without changing the other.

    Layers of keys and values are put together anew whenever they grow: the tensors can be shared.
    Those of other kinds (recurrent states) may be written in place: copied.
    """
    layers = [
        copy.copy(layer) if type(layer).__name__ in _GROWING else copy.deepcopy(layer)
        for layer in cache.layers
    ]
    forked = copy.copy(cache)
    forked.layers = layers
    return forked


_GROWING = {"DynamicLayer", "DynamicSlidingWindowLayer"}


class HuggingFaceBody(nn.Module):
    """The inner model of transformers: ids in, hidden states after the final norm out.

    Positions count the tokens of a row, not its padding: a row gives the same hidden states alone
    and padded in a batch, up to rounding.

    Args:
        base: the inner model, `LlamaModel` say.
        frame: its blocks and what stands behind them, see `find_frame`; None if that is unknown.
    """

    def __init__(self, base: nn.Module, frame: Frame | None) -> None:
        super().__init__()
        self.base = base
        self._frame = frame
        self._takes = set(inspect.signature(base.forward).parameters)

    def forward(
        self, ids: Tensor, cache: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, HuggingFaceCache | RereadCache]:
        """Read new tokens; arguments and results as in `lmhead.sampling.model.Body`."""
        before = 0 if cache is None else cache.length
        if "past_key_values" not in self._takes:
            every = ids if cache is None else torch.cat((cache.ids, ids), 1)
            out = self._read(every, mask, 0, use_cache=False)
            return out.last_hidden_state[:, before:], RereadCache(every)
        past = None if cache is None else fork(cache.inner)
        out = self._read(ids, mask, before, past_key_values=past, use_cache=True)
        return out.last_hidden_state, HuggingFaceCache(out.past_key_values, before + ids.shape[1])

    def layers(self, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """What the head would see after each layer: one (B, T, D) each, what enters the first.

        The last is what `forward` gives. The tail of a model is applied to every layer.
        """
        if self._frame is None:
            raise TypeError(
                f"the layers of {type(self.base).__name__} cannot be looked into: it is not a row "
                "of blocks with modules behind them"
            )
        with self._frame.watched() as states:
            out = self._read(ids, mask, 0, use_cache=False)
        read = []
        for hidden in states[:-1]:
            for module in self._frame.tail:
                hidden = module(hidden)
            read.append(hidden)
        return [*read, out.last_hidden_state]

    def _read(self, ids: Tensor, mask: Tensor | None, before: int, **options: Any) -> Any:
        if ids.dim() != 2:
            raise ValueError(f"ids must have shape (B, T); got {tuple(ids.shape)}")
        shape = (ids.shape[0], before + ids.shape[1])
        if mask is None:
            mask = torch.ones(shape, dtype=torch.bool, device=ids.device)
        if mask.dtype != torch.bool or tuple(mask.shape) != shape:
            raise ValueError(
                f"mask must be bool and of shape {shape}, one entry for each token so far; "
                f"got {mask.dtype} {tuple(mask.shape)}"
            )
        given: dict[str, Any] = {
            "attention_mask": mask.long(),
            "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)[:, before:],
        }
        given = {name: value for name, value in given.items() if name in self._takes}
        return self.base(input_ids=ids, return_dict=True, **given, **options)


@dataclass(frozen=True)
class Frame:
    """How a model is built: blocks one after the other, then a tail of modules.

    Attributes:
        blocks: each takes hidden states (B, T, ...) and gives them on.
        tail: what stands behind the last one, in the order of its calls; () for nothing.
    """

    blocks: tuple[nn.Module, ...]
    tail: tuple[nn.Module, ...]

    @contextmanager
    def watched(self) -> Iterator[list[Tensor]]:
        """A list that a reading inside fills: what enters the first block, what each one gives."""
        states: list[Tensor] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001
            states.append(args[0] if args else kwargs["hidden_states"])

        def leave(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:  # noqa: ARG001
            states.append(_first(out))

        hooks = [self.blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
        hooks += [block.register_forward_hook(leave) for block in self.blocks]
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()


def find_frame(base: nn.Module, run: Callable[[], Any]) -> Frame | None:
    """The blocks of a model and its tail, from watching it run.

    Args:
        base: the inner model.
        run: makes it read something, and gives its output.

    Returns:
        The frame; None where the model is not built like that.
    """
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m)]
    inside = {id(m) for blocks in lists for m in blocks.modules()}
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    given_by: dict[int, Tensor] = {}

    def around(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            calls.append((module, args[0], out))

    def last(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:  # noqa: ARG001
        given_by[id(module)] = _first(out)

    hooks = [m.register_forward_hook(around) for m in base.modules() if id(m) not in inside]
    hooks += [blocks[-1].register_forward_hook(last) for blocks in lists]
    try:
        current = run().last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    tail: list[nn.Module] = []
    for module, given, out in reversed(calls):
        if module is not base and _same(out, current):
            tail.insert(0, module)
            current = given
    for blocks in lists:
        end = given_by.get(id(blocks[-1]))
        if end is not None and _same(end, current):
            frame = Frame(tuple(blocks), tuple(tail))
            with frame.watched() as states:
                run()
            return frame if len(states) == 1 + len(blocks) else None
    return None


def _first(out: Any) -> Tensor:
    """The hidden states that a block gives, alone or before other things."""
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same place."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
