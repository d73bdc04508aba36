"""Constraints: forced, forbidden and biased tokens."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmhead.sampling.stage import Call, Edit, PerRow, per_row


def _ids(ids: Iterable[int], call: Call, name: str) -> list[int]:
    checked = [int(i) for i in ids]
    wrong = next((i for i in checked if not 0 <= i < call.vocab), None)
    if wrong is not None:
        raise ValueError(f"{name} must hold ids in [0, {call.vocab}); got {wrong}")
    return checked


class _EditOfTokens(Edit):
    """An edit that may change the same tokens in every row."""

    @abstractmethod
    def tokens(self, call: Call) -> list[int]:
        """Return the tokens, validated."""

    def touches(self, call: Call) -> Sequence[Sequence[int]]:
        """Return the tokens, once per row."""
        return [self.tokens(call)] * len(call.rows)


@dataclass(repr=False, eq=False)
class Guidance(Edit):
    """Classifier-free guidance: u + scale · (c - u), with c and u the log-probabilities with and
    without the prompt.
    """

    name = "guidance_scale"
    scale: PerRow

    def edit(self, z: Tensor, call: Call) -> None:
        """Move the logits away from the unconditional ones."""
        if call.unconditional is None:
            raise ValueError("guidance_scale needs unconditional, the logits without the prompt")
        scale = per_row(self.name, self.scale, call)[:, None].to(z.dtype)
        c = z.log_softmax(1)
        u = call.unconditional.to(z).log_softmax(1)
        mixed = scale * (c - u) + u
        # A token masked in c or in u stays masked: -inf - -inf would be NaN.
        z.copy_(mixed.masked_fill((c == -math.inf) | (u == -math.inf), -math.inf))


@dataclass(repr=False, eq=False)
class LogitBias(_EditOfTokens):
    """Add a bias to the logits of given tokens."""

    name = "logit_bias"
    bias: Mapping[int, float]

    def tokens(self, call: Call) -> list[int]:
        """Return the tokens that have a bias."""
        return _ids(self.bias, call, self.name)

    def edit(self, z: Tensor, call: Call) -> None:
        """Add the bias."""
        bias = torch.tensor(list(self.bias.values()), dtype=z.dtype, device=z.device)
        z[:, self.tokens(call)] += bias


@dataclass(repr=False, eq=False)
class SequenceBias(_EditOfTokens):
    """Add a bias to the last token of a sequence if the context ends with the others."""

    bias: Mapping[tuple[int, ...], float]
    name: str = field(default="sequence_bias", kw_only=True)

    def tokens(self, call: Call) -> list[int]:
        """Return the last token of each sequence."""
        return _ids([s[-1] for s in self.bias], call, self.name)

    def edit(self, z: Tensor, call: Call) -> None:
        """Add the bias where the context ends with the other tokens of the sequence."""
        for sequence, value in self.bias.items():
            *before, last = _ids(sequence, call, self.name)
            if not before:
                z[:, last] += value
                continue
            for row, ids in enumerate(call.context.ids):
                if ids[-len(before) :] == tuple(before):
                    z[row, last] += value


class BadWords(SequenceBias):
    """Forbid completing these sequences; an end token among `ends` remains possible."""

    def __init__(self, sequences: Sequence[Sequence[int]], ends: Sequence[int] = ()) -> None:
        kept = [tuple(s) for s in sequences if len(s) != 1 or s[0] not in ends]
        super().__init__(dict.fromkeys(kept, -math.inf), name="bad_words_ids")


@dataclass(repr=False, eq=False)
class AllowedIds(Edit):
    """Allow only these tokens."""

    name = "allowed_token_ids"
    ids: Sequence[int]

    def edit(self, z: Tensor, call: Call) -> None:
        """Mask the others."""
        kept = _ids(self.ids, call, self.name)
        allowed = torch.zeros(call.vocab, dtype=torch.bool, device=z.device)
        allowed[kept] = True
        z.masked_fill_(~allowed, -math.inf)


@dataclass(repr=False, eq=False)
class Suppress(_EditOfTokens):
    """Forbid these tokens; with `at_begin`, only as the first one after the prompt.

    With `forced_first` that first token is forced (`forced_bos_token_id`) where the prompt has at
    most one id; then the token after it counts as the first.
    """

    ids: Sequence[int]
    at_begin: bool = field(default=False, kw_only=True)
    forced_first: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.name = "begin_suppress_tokens" if self.at_begin else "suppress_tokens"

    def tokens(self, call: Call) -> list[int]:
        """Return the suppressed tokens."""
        return _ids(self.ids, call, self.name)

    def edit(self, z: Tensor, call: Call) -> None:
        """Mask them."""
        ids = self.tokens(call)
        context = call.context
        for row, (length, prompt) in enumerate(zip(context.lengths, context.prompts, strict=True)):
            begin = prompt + (self.forced_first and prompt <= 1)
            if not self.at_begin or length == begin:
                z[row, ids] = -math.inf


@dataclass(repr=False, eq=False)
class MinLength(_EditOfTokens):
    """Forbid end tokens before a minimum length, with the prompt (`min_length`) or without it."""

    length: int
    ends: Sequence[int]
    new: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.name = "min_new_tokens" if self.new else "min_length"

    def tokens(self, call: Call) -> list[int]:
        """Return the end tokens."""
        return _ids(self.ends, call, "eos_token_id")

    def edit(self, z: Tensor, call: Call) -> None:
        """Mask the ends."""
        ends = self.tokens(call)
        context = call.context
        for row, length in enumerate(context.lengths):
            if length - (context.prompts[row] if self.new else 0) < self.length:
                z[row, ends] = -math.inf


@dataclass(repr=False, eq=False)
class ForcedTokens(Edit):
    """Allow only given tokens at a position: {position: ids}."""

    tokens: Mapping[int, Sequence[int]]
    name: str = field(default="forced_tokens", kw_only=True)

    def edit(self, z: Tensor, call: Call) -> None:
        """Give the forced tokens logit 0 and mask the others."""
        for row, length in enumerate(call.context.lengths):
            if length in self.tokens:
                z[row] = -math.inf
                z[row, _ids(self.tokens[length], call, self.name)] = 0.0
