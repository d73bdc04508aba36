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


class Verification(NamedTuple):
    """How often the answer was another than that of float64 over all words: must be 0."""

    states: int
    disagreements: int
    certificate: Certificate
