"""A transformers model without its head, as the body of a `LanguageModel`.

In:  the inner model, which returns hidden states, and its layers: the blocks, and the modules after
     the last block (the final norm; a projection in OPT-350m).
Out: hidden states (B, T, D), an immutable cache, and the states after each layer.

`find_layers` finds the layers by observing the model on one token: no list of families is needed.
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
    """An immutable cache of transformers.

    Processing more tokens returns a new cache, which shares keys and values with this one.
    """

    inner: Any  # a cache of transformers, never modified
    length: int  # the number of tokens, padding included

    def select(self, rows: Tensor) -> HuggingFaceCache:
        """Return the cache of the rows (B',), which may repeat or drop some."""
        chosen = fork(self.inner)
        chosen.reorder_cache(rows)
        return HuggingFaceCache(chosen, self.length)


@dataclass(frozen=True)
class RereadCache:
    """The ids so far, for models without a key-value cache: all are processed again each time."""

    ids: Tensor  # (B, S)

    @property
    def length(self) -> int:
        """The number S of tokens, padding included."""
        return self.ids.shape[1]

    def select(self, rows: Tensor) -> RereadCache:
        """Return the cache of the rows (B',), which may repeat or drop some."""
        return RereadCache(self.ids.index_select(0, rows))


def fork(cache: Any) -> Any:
    """Return a copy of a cache that can be modified without changing the original.

    Key-value layers are concatenated anew whenever they grow, so their tensors are shared; layers
    of other kinds (recurrent states) may be modified in place, so they are copied.
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
    """

    def __init__(self, base: nn.Module, stack: LayerStack | None) -> None:
        super().__init__()
        self.base = base
        self._stack = stack
        self._accepts = set(inspect.signature(base.forward).parameters)

    def forward(
        self, ids: Tensor, cache: Any = None, mask: Tensor | None = None
    ) -> tuple[Tensor, HuggingFaceCache | RereadCache]:
        """Process new tokens; arguments and results as in `lmhead.sampling.model.Body`."""
        before = 0 if cache is None else cache.length
        if "past_key_values" not in self._accepts or isinstance(cache, RereadCache):
            all_ids = ids if cache is None else torch.cat((cache.ids, ids), 1)
            out = self._read(all_ids, mask, 0, use_cache=False)
            return out.last_hidden_state[:, before:], RereadCache(all_ids)
        past = None if cache is None else fork(cache.inner)
        out = self._read(ids, mask, before, past_key_values=past, use_cache=True)
        if out.past_key_values is None:  # such as Falcon H1 of transformers 5.0: it makes none
            return out.last_hidden_state, RereadCache(ids)
        return out.last_hidden_state, HuggingFaceCache(out.past_key_values, before + ids.shape[1])

    def layers(self, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Return (B, T, D) for the embedding and each layer, with the final norm; see `forward`."""
        if self._stack is None:
            raise TypeError(
                f"the layers of {type(self.base).__name__} are not accessible: it has no "
                "sequential list of blocks"
            )
        with self._stack.recorded() as states:
            out = self._read(ids, mask, 0, use_cache=False)
        normed = []
        for hidden in states[:-1]:
            for module in self._stack.tail:
                hidden = module(hidden)
            normed.append(hidden)
        return [*normed, out.last_hidden_state]

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
        arguments: dict[str, Any] = {
            "attention_mask": mask.long(),
            "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)[:, before:],
        }
        arguments = {name: value for name, value in arguments.items() if name in self._accepts}
        return self.base(input_ids=ids, return_dict=True, **arguments, **options)


@dataclass(frozen=True)
class LayerStack:
    """The layers of a model: sequential blocks, then further modules."""

    blocks: tuple[nn.Module, ...]  # each maps hidden states (B, T, ...) to hidden states
    # the modules after the last block, in the order of their calls; () for none
    tail: tuple[nn.Module, ...]

    @contextmanager
    def recorded(self) -> Iterator[list[Tensor]]:
        """Yield a list that a forward pass fills: the first block's input, every block's output."""
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


def find_layers(base: nn.Module, run: Callable[[], Any]) -> LayerStack | None:
    """Find the blocks of a model by observing a forward pass; None without a sequential list."""
    lists = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m)]
    inside = {id(m) for blocks in lists for m in blocks.modules()}
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    output_of: dict[int, Tensor] = {}

    def around(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            calls.append((module, args[0], out))

    def last(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:  # noqa: ARG001
        output_of[id(module)] = _first(out)

    hooks = [m.register_forward_hook(around) for m in base.modules() if id(m) not in inside]
    hooks += [blocks[-1].register_forward_hook(last) for blocks in lists]
    try:
        current = run().last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    tail: list[nn.Module] = []
    for module, input_, out in reversed(calls):
        if module is not base and _same(out, current):
            tail.insert(0, module)
            current = input_
    for blocks in lists:
        end = output_of.get(id(blocks[-1]))
        if end is not None and _same(end, current):
            stack = LayerStack(tuple(blocks), tuple(tail))
            with stack.recorded() as states:
                run()
            return stack if len(states) == 1 + len(blocks) else None
    return None


def _first(out: Any) -> Tensor:
    """Return the hidden states of a block's output, which may be the first of several."""
    hidden: Tensor = out if isinstance(out, Tensor) else out[0]
    return hidden


def _same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same memory."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
