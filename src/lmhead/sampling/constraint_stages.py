"""Constraints: forced, forbidden and biased tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lmhead.sampling.stage import Call, Edit, PerRow, per_row


def _ids(ids: Iterable[int], call: Call, name: str) -> list[int]:
    checked = [int(i) for i in ids]
    wrong = next((i for i in checked if not 0 <= i < call.vocab), None)
    if wrong is not None:
        raise ValueError(f"{name} must hold ids in [0, {call.vocab}); got {wrong}")
    return checked


def _force(z: Tensor, row: int, ids: list[int]) -> None:
    z[row] = -math.inf
    z[row, ids] = 0.0


class Guidance(Edit):
    """Classifier-free guidance: u + scale · (c - u), with c and u the log-probabilities with and
    without the prompt.
    """

    name = "guidance_scale"

    def __init__(self, scale: PerRow) -> None:
        self.scale = scale

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


class LogitBias(Edit):
    """z + bias for given tokens."""

    name = "logit_bias"

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.bias = dict(bias)

    def edit(self, z: Tensor, call: Call) -> None:
        """Add the bias."""
        ids = _ids(self.bias, call, self.name)
        z[:, ids] += torch.tensor(list(self.bias.values()), dtype=z.dtype, device=z.device)

    def touches(self, call: Call) -> Sequence[Sequence[int]]:
        """Return the tokens that have a bias."""
        return [_ids(self.bias, call, self.name)] * len(call.rows)


class SequenceBias(Edit):
    """Add a bias to the last token of a sequence if the context ends with the others."""

    name = "sequence_bias"

    def __init__(self, bias: Mapping[tuple[int, ...], float], *, name: str | None = None) -> None:
        self.bias = {tuple(sequence): float(value) for sequence, value in bias.items()}
        self.name = name or self.name

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

    def touches(self, call: Call) -> Sequence[Sequence[int]]:
        """Return the last token of each sequence."""
        return [_ids([s[-1] for s in self.bias], call, self.name)] * len(call.rows)


class BadWords(SequenceBias):
    """Forbid completing these sequences; an end token among `ends` remains possible."""

    name = "bad_words_ids"

    def __init__(self, sequences: Sequence[Sequence[int]], ends: Sequence[int] = ()) -> None:
        kept = [tuple(s) for s in sequences if len(s) != 1 or s[0] not in ends]
        super().__init__(dict.fromkeys(kept, -math.inf), name=self.name)


class AllowedIds(Edit):
    """Allow only these tokens."""

    name = "allowed_token_ids"

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)

    def edit(self, z: Tensor, call: Call) -> None:
        """Mask the others."""
        kept = _ids(self.ids, call, self.name)
        allowed = torch.zeros(call.vocab, dtype=torch.bool, device=z.device)
        allowed[kept] = True
        z.masked_fill_(~allowed, -math.inf)


class Suppress(Edit):
    """Forbid these tokens; with `at_begin`, only as the first one after the prompt.

    With `forced_first` that first token is forced (`forced_bos_token_id`) where the prompt has at
    most one id; then the token after it counts as the first.
    """

    name = "suppress_tokens"

    def __init__(
        self, ids: Sequence[int], *, at_begin: bool = False, forced_first: bool = False
    ) -> None:
        self.ids, self.at_begin, self.forced_first = list(ids), at_begin, forced_first
        if at_begin:
            self.name = "begin_suppress_tokens"

    def edit(self, z: Tensor, call: Call) -> None:
        """Mask them."""
        ids = _ids(self.ids, call, self.name)
        context = call.context
        for row, (length, prompt) in enumerate(zip(context.lengths, context.prompts, strict=True)):
            begin = prompt + (self.forced_first and prompt <= 1)
            if not self.at_begin or length == begin:
                z[row, ids] = -math.inf

    def touches(self, call: Call) -> Sequence[Sequence[int]]:
        """Return the suppressed tokens."""
        return [_ids(self.ids, call, self.name)] * len(call.rows)


class MinLength(Edit):
    """Forbid end tokens before a minimum length, with the prompt (`min_length`) or without it."""

    name = "min_length"

    def __init__(self, length: int, ends: Sequence[int], *, new: bool = False) -> None:
        self.length, self.ends, self.new = length, list(ends), new
        if new:
            self.name = "min_new_tokens"

    def edit(self, z: Tensor, call: Call) -> None:
        """Mask the ends."""
        ends = _ids(self.ends, call, "eos_token_id")
        context = call.context
        for row, length in enumerate(context.lengths):
            if length - (context.prompts[row] if self.new else 0) < self.length:
                z[row, ends] = -math.inf

    def touches(self, call: Call) -> Sequence[Sequence[int]]:
        """Return the end tokens."""
        return [_ids(self.ends, call, "eos_token_id")] * len(call.rows)


class ForcedTokens(Edit):
    """Allow only given tokens at a position: {position: ids}."""

    name = "forced_tokens"

    def __init__(self, tokens: Mapping[int, Sequence[int]], *, name: str | None = None) -> None:
        self.tokens = {int(position): list(ids) for position, ids in tokens.items()}
        self.name = name or self.name

    def edit(self, z: Tensor, call: Call) -> None:
        """Give the forced tokens logit 0 and mask the others."""
        for row, length in enumerate(call.context.lengths):
            if length in self.tokens:
                _force(z, row, _ids(self.tokens[length], call, self.name))
