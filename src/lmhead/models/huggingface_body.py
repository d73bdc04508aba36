"""A Hugging Face model without its head, as generation and the logit lens want a body.

In:  the inner model of transformers, which ends in hidden states, and its tail: the modules that
     stand behind the last block (the final norm; a projection in OPT-350m).
Out: hidden states (B, T, D), a cache that is a value, and the layers as the head would see them.

`find_tail` finds the tail by watching the model read one token, so that no family needs an entry
in a list.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
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
        chosen.batch_select_indices(rows)
        return HuggingFaceCache(chosen, self.length)


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
        tail: what stands behind its last block, see `find_tail`; None where that is unknown.
    """

    def __init__(self, base: nn.Module, tail: tuple[nn.Module, ...] | None) -> None:
        super().__init__()
        self.base = base
        self._tail = tail  # a tuple is not registered: the modules are parts of base
        self._takes = set(inspect.signature(base.forward).parameters)

    def forward(
        self, ids: Tensor, cache: HuggingFaceCache | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, HuggingFaceCache]:
        """Read new tokens; arguments and results as in `lmhead.sampling.model.Body`."""
        before = 0 if cache is None else cache.length
        past = None if cache is None else fork(cache.inner)
        out = self._read(ids, mask, before, past_key_values=past, use_cache=True)
        return out.last_hidden_state, HuggingFaceCache(out.past_key_values, before + ids.shape[1])

    def layers(self, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """What the head would see after each layer: one (B, T, D) each, the embedding first.

        The last is what `forward` gives. The tail of a model is applied to every layer.
        """
        if self._tail is None:
            raise TypeError(
                f"the layers of {type(self.base).__name__} cannot be looked into: what it does "
                "behind its last block is not a sequence of modules"
            )
        out = self._read(ids, mask, 0, use_cache=False, output_hidden_states=True)
        read = []
        for hidden in out.hidden_states[:-1]:
            for module in self._tail:
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
        given = {
            "attention_mask": mask.long(),
            "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0)[:, before:],
        }
        given = {name: value for name, value in given.items() if name in self._takes}
        return self.base(input_ids=ids, return_dict=True, **given, **options)


def find_tail(base: nn.Module, run: Callable[[], Any]) -> tuple[nn.Module, ...] | None:
    """The modules between the last block and the hidden states, in the order they are called.

    Args:
        base: the inner model.
        run: makes it read something, and gives its output.

    Returns:
        () where the last block gives the hidden states itself; None where it cannot be told.
    """
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    blocks = [m for m in base.modules() if isinstance(m, nn.ModuleList)]
    inside = {id(m) for block in blocks for m in block.modules()}

    def watch(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            calls.append((module, args[0], out))

    hooks = [
        module.register_forward_hook(watch)
        for module in base.modules()
        if module is not base and id(module) not in inside
    ]
    last_of = {id(block[-1]) for block in blocks if len(block)}
    ends: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], out: Any) -> None:  # noqa: ARG001
        first = out if isinstance(out, Tensor) else out[0]
        ends.append(first)

    hooks += [m.register_forward_hook(note) for m in base.modules() if id(m) in last_of]
    try:
        current = run().last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    tail: list[nn.Module] = []
    for module, given, out in reversed(calls):
        if _same(out, current):
            tail.insert(0, module)
            current = given
    return tuple(tail) if any(_same(end, current) for end in ends) else None


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same place."""
    return a.data_ptr() == b.data_ptr() and a.numel() == b.numel()
