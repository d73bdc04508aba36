"""Results of a sampler: a token per row and its log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from lmhead.sampling.distribution import Distribution, TopCandidates


class Kept(Sequence[Tensor]):
    """Per row the ids that were kept, ascending: `kept[i]` is an int64 vector.

    Where most tokens were kept, only the others are stored.
    """

    def __init__(
        self,
        vocab: int,
        kept_ids: list[Tensor | None],
        cut_ids: list[Tensor | None],
        candidates: TopCandidates | None = None,
    ) -> None:
        self._vocab, self._listed, self._cut, self._candidates = (
            vocab,
            kept_ids,
            cut_ids,
            candidates,
        )

    @property
    def _kept(self) -> list[Tensor | None]:
        """Per row the ids, where these are listed; made on first use."""
        candidates, self._candidates = self._candidates, None
        if candidates is not None:
            ids = candidates.ids.masked_fill(candidates.z == -math.inf, self._vocab).sort(1).values
            self._listed = [ids[i, :n] for i, n in enumerate(candidates.n.int().tolist())]
        return self._listed

    @classmethod
    def of(cls, distribution: Distribution, vocab: int) -> Kept:
        """Return the tokens that are left."""
        if isinstance(distribution, TopCandidates):
            return cls(vocab, [], [None] * len(distribution.z), distribution)
        n = distribution.n.long()
        none: list[Tensor | None] = [None] * len(n)
        if bool((n == vocab).all()):
            return cls(vocab, none, none)
        # Of each row the shorter list.
        masked = distribution.z == -math.inf
        most = n * 2 >= vocab
        listed = torch.where(most[:, None], masked, ~masked)
        sizes = torch.where(most, vocab - n, n).tolist()
        lists = torch.split_with_sizes(listed.nonzero()[:, 1], sizes)
        pairs = list(zip(lists, most.tolist(), strict=True))
        kept = [None if m else ids for ids, m in pairs]
        return cls(vocab, kept, [ids if m else None for ids, m in pairs])

    @classmethod
    def join(cls, parts: Sequence[Kept], rows: Sequence[Tensor]) -> Kept:
        """Join the parts of a batch in the order of its rows."""
        n = sum(len(r) for r in rows)
        kept_ids: list[Tensor | None] = [None] * n
        cut_ids: list[Tensor | None] = [None] * n
        for part, numbers in zip(parts, rows, strict=True):
            for i, row in enumerate(numbers.tolist()):
                kept_ids[row], cut_ids[row] = part._kept[i], part._cut[i]
        return cls(parts[0]._vocab, kept_ids, cut_ids)

    def __len__(self) -> int:
        return len(self._cut)

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> list[Tensor]: ...
    def __getitem__(self, i: int | slice) -> Tensor | list[Tensor]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        kept_ids, cut_ids = self._kept[i], self._cut[i]
        if kept_ids is not None:
            return kept_ids
        if cut_ids is None:
            return torch.arange(self._vocab)
        left = torch.ones(self._vocab, dtype=torch.bool, device=cut_ids.device)
        left[cut_ids] = False
        return left.nonzero()[:, 0]

    def counts(self) -> list[int]:
        """Return how many tokens were kept, per row, without making the lists."""
        sizes = []
        for kept_ids, cut_ids in zip(self._kept, self._cut, strict=True):
            if kept_ids is not None:
                sizes.append(len(kept_ids))
            else:
                sizes.append(self._vocab - (0 if cut_ids is None else len(cut_ids)))
        return sizes

    def __repr__(self) -> str:
        return f"Kept({self.counts()} of {self._vocab} tokens)"


@dataclass(frozen=True)
class Sampled:
    """One token per row, (...) as the logits (..., V) have it.

    Attributes:
        token: the id, int64.
        log_prob: of the token in the distribution that it was drawn from, float64.
        raw_log_prob: of the token in softmax(logits), before any stage, float64.
        log_kept_mass: log of the mass that the kept tokens have in softmax(logits), float64.
        kept: per row the ids that could have been drawn, ascending.
        state: what the next call needs to be given (mirostat), or None.
    """

    token: Tensor
    log_prob: Tensor
    raw_log_prob: Tensor
    log_kept_mass: Tensor
    kept: Kept
    state: Tensor | None = None


class ScreenedSampled(Sampled):
    """Result for a screened head: the token; exact log-probabilities are computed when read.

    Attributes:
        estimate: log-probabilities in the middle of certified intervals, from the copy alone:
            (log_prob, raw_log_prob).
        estimate_error: how far an estimate may be off.
    """

    def __init__(
        self,
        token: Tensor,
        estimate: tuple[Tensor, Tensor],
        estimate_error: float,
        exact: Callable[[], Sampled],
    ) -> None:
        for name, value in (
            ("token", token),
            ("estimate", estimate),
            ("estimate_error", estimate_error),
            ("_exact", exact),
        ):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name not in ("log_prob", "raw_log_prob", "log_kept_mass", "kept"):
            raise AttributeError(f"'Sampled' object has no attribute {name!r}")
        exact = self._exact()
        for field in ("log_prob", "raw_log_prob", "log_kept_mass", "kept"):
            object.__setattr__(self, field, getattr(exact, field))
        return getattr(self, name)
