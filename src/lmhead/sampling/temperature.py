"""Temperature stages: fixed and dynamic."""

from __future__ import annotations

import torch

from lmhead.sampling.distribution import Distribution
from lmhead.sampling.stage import Call, PerRow, Stage, per_row


class Temperature(Stage):
    """z / T. A temperature of 0 is a greedy choice, which the sampler makes without this stage."""

    name = "temperature"
    keeps_argmax = True

    def __init__(self, temperature: PerRow) -> None:
        self.temperature = temperature

    def __call__(self, distribution: Distribution, call: Call) -> Distribution:
        """Scale the logits; nothing is computed yet where all tokens are left."""
        return distribution.scaled(1 / per_row(self.name, self.temperature, call))


class DynamicTemperature(Stage):
    """z / T', where T' goes from T - range to T + range with the entropy of the distribution.

    T' = low + (high - low) · (entropy / log(number of tokens))^exponent
    """

    name = "dynatemp_range"
    takes = "probabilities"
    keeps_argmax = True
    _LEAST = 1e-6  # a temperature of 0 would be a division by it

    def __init__(self, temperature: PerRow, range: PerRow, exponent: PerRow = 1.0) -> None:
        self.temperature, self.range, self.exponent = temperature, range, exponent

    def __call__(self, distribution: Distribution, call: Call) -> Distribution:
        """Scale the logits by the entropy of what is left."""
        middle = per_row("temperature", self.temperature, call)
        range = per_row(self.name, self.range, call)
        exponent = per_row("dynatemp_exponent", self.exponent, call)
        low, high = (middle - range).clamp(min=0), middle + range
        share = torch.where(distribution.n > 1, distribution.entropy / distribution.n.log(), 0.0)
        temperature = low + (high - low) * share.clamp(0, 1) ** exponent
        temperature = torch.where((range > 0) & (distribution.n > 1), temperature, middle)
        return distribution.scaled(1 / temperature.clamp(min=self._LEAST))
