"""Batch-invariant decoding: each sequence gets the same numbers as if it were decoded alone.

In:  prompts, then one new token per sequence and step; sequences join and leave between steps.
Out: the hidden state of each last token.

A plain matrix product rounds differently for different numbers of rows, and attention over padded
rows for different amounts of padding. Here every row of a linear layer is summed in one fixed
order (the weight is read once per step, whatever the number of rows), activations and
rotary angles are computed row by row, and attention reads each sequence's own keys and values,
without padding. A Llama's steps are one call into the compiled core each (`DecodeStep`), which
gives the numbers that `generate` gets from it; other bodies run through torch, layer by layer.
Prompts are processed one at a time, in parts of a fixed size, so that the steps of other sequences
can come between two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.nn.multi_head_attention import AttentionMask, KeyValue, RotaryAngles
from lmhead.nn.transformer import Block, DecoderBody, FeedForward
from lmhead.sweep.kernels import row_logits

PART = 512  # tokens of a prompt that are processed together
_SPARE = 64  # tokens of spare capacity of a new sequence after its prompt; doubled when it is full


class RowLinear(nn.Linear):
    """A linear layer whose rows do not depend on the other rows of the input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., out) for x (..., in)."""
        rows = x.reshape(-1, x.shape[-1])
        out = row_logits(rows, self.weight, dtype=torch.float32)
        if out is None:  # without the compiled core: one product per row
            out = torch.cat([F.linear(row, self.weight) for row in torch.split(rows, 1)])
        out = out.to(x.dtype)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*x.shape[:-1], -1)


def row_by_row(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function of (B, ...) that is applied to each row by itself.

    Vectorized exponentials and their scalar versions, used at the end of a tensor or of
    a thread's part, round differently.
    """
    return lambda x: torch.cat([function(row) for row in torch.split(x, 1)])


class SequenceCache:
    """Keys and values of one sequence, (L, G, capacity, d) each, of which `length` are used."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.length = keys[0].shape[2]
        self._keys, self._values = (self._with_spare(torch.cat(list(t))) for t in (keys, values))

    def _with_spare(self, used: Tensor) -> Tensor:
        return F.pad(used, (0, 0, 0, max(_SPARE, self.length)))

    def copy(self) -> SequenceCache:
        """Return an independent copy."""
        new = SequenceCache.__new__(SequenceCache)
        new.length = self.length
        new._keys, new._values = self._keys.clone(), self._values.clone()
        return new

    def writable_memory(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, (L, G, capacity, d), with space for one more token."""
        if self.length == self._keys.shape[2]:
            self._keys, self._values = self._with_spare(self._keys), self._with_spare(self._values)
        return self._keys, self._values

    def append(self, layer: int, key: Tensor, value: Tensor) -> KeyValue:
        """Add the token after the last one, (1, G, 1, d) each; return all: (1, G, S, d) each."""
        self.writable_memory()
        end = self.length + 1
        self._keys[layer, :, self.length] = key[0, :, 0]
        self._values[layer, :, self.length] = value[0, :, 0]
        return self._keys[layer : layer + 1, :, :end], self._values[layer : layer + 1, :, :end]


class BatchDecoder:
    """Process one token of each of several sequences per step; weights of `body` are shared.

    >>> from lmhead.nn import LlamaBody, LlamaConfig
    >>> _ = torch.manual_seed(0)
    >>> body = LlamaBody(LlamaConfig(50, 16, 24, 2, 4, 2)).requires_grad_(False)
    >>> decoder = BatchDecoder(body)
    >>> _, long = decoder.start([3, 1, 4])
    >>> (_, short), (_, again) = decoder.start([1, 5]), decoder.start([1, 5])
    >>> together, alone = decoder.step([7, 9], [long, short]), decoder.step([9], [again])
    >>> torch.equal(together[1], alone[0])
    True
    """

    def __init__(self, body: DecoderBody) -> None:
        if body.has_cross_attention:
            raise ValueError("body must have no cross-attention")
        self.body = body
        tensors = [*body.parameters(), *body.buffers()]
        shared: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
        shared[id(body.step)] = None
        self._core = body.step
        self._rows: DecoderBody = deepcopy(body, shared).eval()
        for module in self._rows.modules():
            if type(module) is nn.Linear:
                module.__class__ = RowLinear
            elif isinstance(module, FeedForward):
                module.activation = row_by_row(module.activation)

    def start(self, ids: Sequence[int]) -> tuple[Tensor, SequenceCache]:
        """Process a prompt; return the hidden state of its last token (D,), and the sequence."""
        return next(result for result in self.start_in_parts(ids) if result is not None)

    def start_in_parts(self, ids: Sequence[int]) -> Iterator[tuple[Tensor, SequenceCache] | None]:
        """Yield None after each part of a prompt but the last, and then what `start` returns."""
        if self._core is not None and not self._core.is_current():
            self._core = None  # the weights have changed; `_rows` shares them
        cache: Any = None
        for first in range(0, len(ids), PART):
            if first:
                yield None
            with torch.no_grad():
                part = torch.tensor([list(ids[first : first + PART])])
                hidden, cache = self.body(part, cache)
        yield hidden[0, -1], SequenceCache(cache.keys, cache.values)

    def _embed(
        self, tokens: Sequence[int], sequences: Sequence[SequenceCache]
    ) -> tuple[Tensor, RotaryAngles | None]:
        """Embed tokens, (B, 1, D), with their angles, each by itself."""
        pairs = zip(tokens, sequences, strict=True)
        embedded = [
            self._rows.embed(torch.tensor([[token]]), sequence.length) for token, sequence in pairs
        ]
        x, angles = (
            torch.cat([x for x, _ in embedded]),
            [both for _, both in embedded if both is not None],
        )
        if not angles:
            return x, None
        cos, sin = zip(*angles, strict=True)
        return x, (torch.cat(cos), torch.cat(sin))

    @torch.no_grad()
    def step(self, tokens: Sequence[int], sequences: Sequence[SequenceCache]) -> Tensor:
        """Process one more token of each sequence; return the hidden states (B, D)."""
        if self._core is not None:
            memory = [sequence.writable_memory() for sequence in sequences]
            hidden = self._core.rows(tokens, memory, [sequence.length for sequence in sequences])
        else:
            hidden = self._step_layers(tokens, sequences)
        for sequence in sequences:
            sequence.length += 1
        return hidden

    def _step_layers(self, tokens: Sequence[int], sequences: Sequence[SequenceCache]) -> Tensor:
        """Run `step` with torch, layer by layer."""
        x, rotary = self._embed(tokens, sequences)
        for layer, module in enumerate(self._rows.blocks):
            block = cast(Block, module)
            attention = block.attention
            normed = block._before(block.attention_norm, x)
            query = attention._split_heads(attention.query(normed), attention.heads, rotary)
            keys, values = attention.project(normed, rotary)
            attended = [
                attention.attended(
                    query[i : i + 1], sequence.append(layer, key, value), AttentionMask()
                )
                for i, (sequence, key, value) in enumerate(
                    zip(sequences, torch.split(keys, 1), torch.split(values, 1), strict=True)
                )
            ]
            x = block._add(block.attention_norm, x, attention.output(torch.cat(attended)))
            change = block.feed_forward(block._before(block.feed_forward_norm, x))
            x = block._add(block.feed_forward_norm, x, change)
        hidden: Tensor = self._rows.norm(x)[:, 0]
        return hidden
