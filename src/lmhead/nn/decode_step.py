"""One token at a time through a Llama, of one sequence or several, in the compiled core.

In:  the id of the next token of each sequence, and the cache of the tokens before it.
Out: its hidden state after the final norm, and the cache with it.

In a small model torch takes as long for the many small operations of a layer as for its products;
the core does all layers in one call. A matrix that a GGUF file stores in blocks is read as blocks:
the same numbers from an eighth to a quarter of the bytes. Sums are in float32, as in torch, but in
another order, which does not depend on the other sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmhead.nn.multi_head_attention import KeyValueCache, rotary_angles
from lmhead.nn.transformer import Block, DecoderBody
from lmhead.sweep import kernels

_SPARE = 64  # positions of spare capacity of a new cache; doubled when it is full
_ANGLES = 256  # positions whose angles are computed at once
_MATRICES = (
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "feed_forward.gate",
    "feed_forward.up",
    "feed_forward.down",
)
BLOCK_TYPES = ("Q4_0", "Q4_1", "Q8_0")
"""GGUF's types that the core reads; blocks of 32 entries."""
_NORMS = ("attention_norm", "feed_forward_norm")


class StoredBlocks(NamedTuple):
    """A matrix as a GGUF file stores it: the name of the type, and its bytes, (rows, bytes)."""

    type: str
    data: Tensor


class _SharedMemory:
    """Memory of keys and values, (L, G, capacity, d) each, of which the first `used` are filled."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Copy keys and values (L, G, S, d) into memory with spare capacity."""
        self.used = keys.shape[2]
        self.keys, self.values = (
            F.pad(t, (0, 0, 0, max(_SPARE, self.used))) for t in (keys, values)
        )
        self._lock = Lock()

    def after(self, length: int) -> _SharedMemory:
        """Return memory with the first `length` positions whose next one the caller may write.

        That is this one, unless it is full or its next position has been written already.
        """
        with self._lock:
            if self.used == length < self.keys.shape[2]:
                self.used += 1
                return self
        shared = _SharedMemory(self.keys[:, :, :length], self.values[:, :, :length])
        shared.used += 1
        return shared


class GrowingCache(KeyValueCache):
    """The first positions of a `_SharedMemory`, which other caches may share; immutable."""

    def __init__(self, shared: _SharedMemory, length: int) -> None:
        object.__setattr__(self, "_shared", shared)
        object.__setattr__(self, "_length", length)

    _shared: _SharedMemory
    _length: int
    memory = None

    @property
    def length(self) -> int:
        """The number S of tokens."""
        return self._length

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """Keys per layer, (1, G, S, d) each."""
        return tuple(self._shared.keys[:, None, :, : self._length])

    @property
    def values(self) -> tuple[Tensor, ...]:
        """Values per layer, (1, G, S, d) each."""
        return tuple(self._shared.values[:, None, :, : self._length])

    def writable_memory(self) -> _SharedMemory:
        """Return memory whose position after this cache the caller may write."""
        return self._shared.after(self._length)


class DecodeStep:
    """Process one token of one sequence, or of each of several; weights of `body` are shared.

    `blocks` are matrices of GGUF files by the name of the parameter; the others are read as
    float32. `types` says how matrices are stored: "F32" or some of `BLOCK_TYPES`.
    """

    def __init__(self, body: DecoderBody, blocks: Mapping[str, StoredBlocks] | None = None) -> None:
        self._body = body
        stored = blocks or {}
        names = [f"blocks.{i}.{m}.weight" for i in range(len(body.blocks)) for m in _MATRICES]
        weights = dict(body.named_parameters())
        matrices = [stored.get(n) or StoredBlocks("F32", weights[n].detach()) for n in names]
        norms = [
            weights[f"blocks.{i}.{n}.weight"].detach()
            for i in range(len(body.blocks))
            for n in _NORMS
        ]
        norms.append(weights["norm.weight"].detach())
        sizes = body.sizes
        first = cast(Block, body.blocks[0]).attention
        self.types = {m.type for m in matrices}
        self._model = kernels.compiled().decode_model(
            [m.data for m in matrices],
            [m.type for m in matrices],
            norms,
            *(first.heads, first.key_heads, first.head_size),
            sizes.norm_eps,
            sizes.rotary == "interleaved",
        )
        self._angles = (torch.empty(0, first.head_size // 2),) * 2
        self._state = _state(body)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Become None in a copy of the body: the addresses are those of the original's weights."""
        return type(None), ()

    def takes(self, ids: Tensor, cache: Any, mask: Tensor | None) -> bool:
        """Return whether this input is one token after others, of one row without padding."""
        if ids.shape != (1, 1) or cache is None or torch.is_grad_enabled() or self._body.training:
            return False
        if torch.compiler.is_compiling() or not (mask is None or bool(mask.all())):
            return False
        # Replaced weights or modules are detected once per sequence.
        return isinstance(cache, GrowingCache) or _state(self._body) == self._state

    def __call__(self, ids: Tensor, cache: KeyValueCache) -> tuple[Tensor, GrowingCache]:
        """Process ids (1, 1); return the hidden state (1, 1, D), and the cache."""
        before = cache.length
        if isinstance(cache, GrowingCache):
            shared = cache.writable_memory()
        else:
            shared = _SharedMemory(torch.cat(cache.keys), torch.cat(cache.values)).after(before)
        hidden = self.rows(ids[0].tolist(), [(shared.keys, shared.values)], [before])
        return hidden[None], GrowingCache(shared, before + 1)

    @torch.no_grad()
    def rows(
        self, tokens: Sequence[int], memory: Sequence[tuple[Tensor, Tensor]], used: Sequence[int]
    ) -> Tensor:
        """Process one token of each of several sequences; return the hidden states (B, D).

        Keys and values of a sequence in `memory` are (L, G, capacity, d), of which the first `used`
        are filled; those of the token are written after them.
        """
        scale = self._body.sizes.embedding_scale
        x = self._body.embedding.weight[torch.tensor(tokens)]
        if scale != 1.0:
            x = x * scale
        cos, sin = self._rotary(used)
        keys, values = zip(*memory, strict=True)
        kernels.compiled().decode_step(
            self._model, x, cos, sin, keys, values, used, kernels.threads()
        )
        return x

    def is_current(self) -> bool:
        """Return whether the body still has the weights that this step was built with."""
        return _weights(self._body) == self._state[:-1]

    def _rotary(self, used: Sequence[int]) -> tuple[Tensor, Tensor]:
        computed, last = len(self._angles[0]), max(used)
        if last >= computed:
            sizes = self._body.sizes
            positions = torch.arange(max(2 * computed, last + _ANGLES))[None]
            size, theta, factors = sizes.head_size, sizes.rope_theta, sizes.rope_factors
            cos, sin = rotary_angles(positions, size, theta, torch.float32, factors)
            self._angles = cos[0, :, 0].contiguous(), sin[0, :, 0].contiguous()
        index = torch.tensor(used)
        return self._angles[0][index], self._angles[1][index]


def attach_step(body: DecoderBody) -> None:
    """Make the core process single tokens of a body from now on, if it supports the body."""
    if is_supported(body):
        body.step = DecodeStep(body)


def is_supported(body: DecoderBody) -> bool:
    """Return whether the core can process a body: a Llama in float32 on the CPU."""
    sizes = body.sizes
    return (
        kernels.core_with("decode_model") is not None
        and (sizes.position, sizes.norm, sizes.activation) == ("rotary", "rms", "swiglu")
        and sizes.norm_first
        and not sizes.bias
        and not body.has_cross_attention
        and all(p.dtype == torch.float32 and p.is_contiguous() for p in body.parameters())
        and kernels.readable(*body.parameters())
    )


def _state(body: nn.Module) -> list[tuple[int, int]]:
    """Return a fingerprint that changes if a weight or module is replaced, or a hook is added."""
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in body.modules())
    return [*_weights(body), (len(list(body.modules())), hooks)]


def _weights(body: nn.Module) -> list[tuple[int, int]]:
    """Return a fingerprint that changes if a weight is replaced or written to."""
    return [
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for tensor in body.parameters()
    ]
