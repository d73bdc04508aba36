"""What a `ScreenedHead` gives: the answer, and how it was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Certificate:
    """How an answer was found.

    Attributes:
        rows_rescored: (...), for each hidden state how many words were scored in float64.
        fell_back: (...), whether the bounds left too much and all words were scored.
        bytes_read: of copy and weight together, for the whole batch.
    """

    rows_rescored: Tensor
    fell_back: Tensor
    bytes_read: int

    @property
    def fall_back_rate(self) -> float:
        """The share of hidden states for which all words were scored."""
        return float(self.fell_back.double().mean()) if self.fell_back.numel() else 0.0

    def reshape(self, lead: torch.Size) -> Certificate:
        """The same for hidden states of another shape."""
        rescored, fell = self.rows_rescored.reshape(lead), self.fell_back.reshape(lead)
        return Certificate(rescored, fell, self.bytes_read)


class ScreenedArgmax(NamedTuple):
    """token (...): the id of the largest float64 logit, the lowest among equals."""

    token: Tensor
    certificate: Certificate


class ScreenedTopK(NamedTuple):
    """values (..., k) in float64 and indices (..., k), by value, ties by lowest id."""

    values: Tensor
    indices: Tensor
    certificate: Certificate


class Interval(NamedTuple):
    """Two numbers per hidden state between which the true one lies, (...) each; equal if exact."""

    low: Tensor
    high: Tensor


class ScreenedSample(NamedTuple):
    """token (...): what the sampler gives for the float64 logits.

    log_prob is of the distribution that the token was drawn from, raw_log_prob of the model's own.
    """

    token: Tensor
    log_prob: Interval
    raw_log_prob: Interval
    certificate: Certificate

    def reshape(self, lead: torch.Size) -> ScreenedSample:
        """The same for hidden states of another shape."""
        return ScreenedSample(
            self.token.reshape(lead),
            Interval(*(x.reshape(lead) for x in self.log_prob)),
            Interval(*(x.reshape(lead) for x in self.raw_log_prob)),
            self.certificate.reshape(lead),
        )


class Verification(NamedTuple):
    """How often the answer was another than that of float64 over all words: must be 0."""

    states: int
    disagreements: int
    certificate: Certificate
