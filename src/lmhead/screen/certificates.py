"""What a `ScreenedHead` gives: the answer, and how it was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Certificate:
    """How an answer was found.

    Attributes:
        rows_rescored: (...), for each hidden state how many tokens were scored in float64.
        fell_back: (...), whether the bounds left too much and all tokens were scored.
        bytes_read: of copy and weight together, for the whole batch.
    """

    rows_rescored: Tensor
    fell_back: Tensor
    bytes_read: int

    @property
    def fall_back_rate(self) -> float:
        """The share of hidden states for which all tokens were scored."""
        return float(self.fell_back.double().mean()) if self.fell_back.numel() else 0.0

    def reshape(self, lead: torch.Size) -> Certificate:
        """Return the same for hidden states of another shape."""
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
        """Return the same for hidden states of another shape."""
        return ScreenedSample(
            self.token.reshape(lead),
            Interval(*(x.reshape(lead) for x in self.log_prob)),
            Interval(*(x.reshape(lead) for x in self.raw_log_prob)),
            self.certificate.reshape(lead),
        )


class Verification(NamedTuple):
    """How often the answer was another than that of float64 over all tokens: must be 0."""

    states: int
    disagreements: int
    certificate: Certificate


@dataclass
class ScreenReport:
    """What certified decode did so far.

    Attributes:
        choices: number of tokens chosen.
        bytes_read: bytes of copy and weight read for all of them.
        bytes_full: bytes that reading the whole weight at every step would have taken.
        rows_rescored: number of tokens scored in float64 per choice, on average.
        fell_back: number of choices for which the bounds left too much and all tokens were scored.
    """

    choices: int = 0
    bytes_read: int = 0
    bytes_full: int = 0
    rows_rescored: float = 0.0
    fell_back: int = 0

    def add(self, certificate: Certificate, weight_bytes: int) -> None:
        """Count the rows of one call."""
        rows = certificate.fell_back.numel()
        if rows == 0:
            return
        rescored = float(certificate.rows_rescored.double().sum())
        total = self.rows_rescored * self.choices + rescored
        self.choices += rows
        self.rows_rescored = total / self.choices
        self.bytes_read += certificate.bytes_read
        self.bytes_full += weight_bytes
        self.fell_back += int(certificate.fell_back.sum())

    @property
    def share_read(self) -> float:
        """The share of the bytes that was read."""
        return self.bytes_read / self.bytes_full if self.bytes_full else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return every attribute, and `share_read`."""
        return {
            "choices": self.choices,
            "bytes_read": self.bytes_read,
            "bytes_full": self.bytes_full,
            "share_read": self.share_read,
            "rows_rescored": self.rows_rescored,
            "fell_back": self.fell_back,
        }
