"""The learning rate: a straight line up, then half a cosine down."""

from __future__ import annotations

import math

from lmhead.train.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of a step (0 is the first); a function of the step alone.

    warm-up   rate · (step + 1) / (warmup + 1)
    then      low + (rate - low) · (1 + cos(π · t)) / 2,  t from 0 to 1 at the last step

    >>> config = TrainConfig(steps=10, warmup=3, learning_rate=1.0, min_learning_rate=0.1)
    >>> [round(learning_rate(step, config), 2) for step in range(11)]
    [0.25, 0.5, 0.75, 1.0, 0.96, 0.83, 0.65, 0.45, 0.27, 0.14, 0.1]
    """
    high, low = config.learning_rate, config.min_learning_rate
    if step < config.warmup:
        return high * (step + 1) / (config.warmup + 1)
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    return low + (high - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2
