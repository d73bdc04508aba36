"""Generation through certified decode: a sampler that reads the quantized copy, and its report.

In:  a `ScreenedHead` and a sampler, for `generate(model, prompt, ScreenedSampler(...))`.
Out: the same tokens as without; `ScreenReport`, what it saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lmhead.logits import LazyLogits
from lmhead.sampling import Sampler
from lmhead.screen import ScreenedHead


@dataclass(frozen=True)
class ScreenReport:
    """What certified decode did.

    Attributes:
        choices: how many tokens were chosen.
        bytes_read: of copy and weight, for all of them.
        bytes_full: what reading the whole weight at every step would have been.
        rows_rescored: how many words were scored in float64, on average.
        fell_back: for how many tokens the bounds left too much and all words were scored.
    """

    choices: int = 0
    bytes_read: int = 0
    bytes_full: int = 0
    rows_rescored: float = 0.0
    fell_back: int = 0

    @property
    def share_read(self) -> float:
        """How much of the bytes were read."""
        return self.bytes_read / self.bytes_full if self.bytes_full else 0.0

    def to_json(self) -> dict[str, Any]:
        """Every attribute, and `share_read`."""
        return {
            "choices": self.choices,
            "bytes_read": self.bytes_read,
            "bytes_full": self.bytes_full,
            "share_read": self.share_read,
            "rows_rescored": self.rows_rescored,
            "fell_back": self.fell_back,
        }


@dataclass(frozen=True)
class _Chosen:
    """What `generate` wants of a sampler."""

    token: Tensor
    log_prob: Tensor
    raw_log_prob: Tensor
    state: None = None


class ScreenedSampler:
    """A sampler for `generate` whose tokens are decided from a head's quantized copy.

    Equivalent to: sampler(logits, ...), with the same tokens

    Log-probabilities are the middle of an interval that is known to hold them; `widest` is half of
    the widest one so far.

    Args:
        screened: the head's copy.
        sampler: the chain; None for the best word.

    Attributes:
        report: what was read so far.
        widest: how far a reported log-probability may be off.
    """

    def __init__(self, screened: ScreenedHead, sampler: Sampler | None = None) -> None:
        self.screened = screened
        self.sampler = Sampler(do_sample=False) if sampler is None else sampler
        self.report, self.widest = ScreenReport(), 0.0
        if any(stage.name == "mirostat" for stage in self.sampler.stages):
            raise ValueError("mirostat does not go with certified decode: it needs its state")

    def __call__(
        self,
        logits: LazyLogits,
        context: Tensor,
        position: Tensor,
        *,
        prompt_length: Tensor,
        context_mask: Tensor,
        state: None = None,  # noqa: ARG002
    ) -> _Chosen:
        """One token per row, as `generate` asks for it."""
        hidden = logits.source().hiddens[0]
        answer = self.screened.sample(
            hidden,
            self.sampler,
            context,
            position,
            prompt_length=prompt_length,
            context_mask=context_mask,
        )
        self._note(answer.certificate, len(hidden))
        middles = []
        for low, high in (answer.log_prob, answer.raw_log_prob):
            middles.append((low + high) / 2)
            self.widest = max(self.widest, float((high - low).max()) / 2)
        return _Chosen(answer.token, middles[0], middles[1])

    def select(self, rows: Tensor) -> ScreenedSampler:
        """The sampler of some rows; the report goes on."""
        self.sampler = self.sampler.select(rows)
        return self

    def _note(self, certificate: Any, rows: int) -> None:
        r = self.report
        choices = r.choices + rows
        rescored = float(certificate.rows_rescored.double().sum()) + r.rows_rescored * r.choices
        self.report = replace(
            r,
            choices=choices,
            bytes_read=r.bytes_read + certificate.bytes_read,
            bytes_full=r.bytes_full + self.screened.head.weight.nbytes,
            rows_rescored=rescored / choices,
            fell_back=r.fell_back + int(torch.count_nonzero(certificate.fell_back)),
        )
