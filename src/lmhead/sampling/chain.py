"""Validate a chain of stages when it is built."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmhead.sampler_options import Options
from lmhead.sampling.constraint_stages import AllowedIds, ForcedTokens
from lmhead.sampling.run_stages import active
from lmhead.sampling.stage import Cut, DynamicTemperature, Stage, Temperature
from lmhead.sampling.truncation_stages import XTC


def check_chain(stages: Sequence[Stage], options: Options) -> None:
    """Raise a ValueError for stages that do not work together."""
    cut: Stage | None = None
    last: Stage | None = None
    for number, stage in enumerate(stages):
        if not isinstance(stage, Stage):
            raise TypeError(
                f"stages must hold Stage objects; got {type(stage).__name__} at index {number}"
            )
        if last is not None and last.must_be_last:
            raise ValueError(f"{last.name} must be the last stage; move {stage.name} before it")
        if cut is not None and isinstance(stage, AllowedIds | ForcedTokens):
            raise ValueError(
                f"{stage.name} comes after {cut.name}: its tokens may have been removed "
                f"already; put it first"
            )
        if stage.must_be_last and cut is not None:
            raise ValueError(f"{stage.name} picks its own cutoff; remove {cut.name} before it")
        if isinstance(stage, Cut | XTC):
            cut = stage
        last = stage
    for cls in (Temperature, DynamicTemperature):
        if sum(isinstance(s, cls) for s in stages) > 1:
            raise ValueError(
                f"{cls.name} occurs twice in stages; use it once, with the product of the two"
            )
    cold = bool((torch.as_tensor(options.temperature, dtype=torch.float64) == 0).any())
    if not cold and options.do_sample:
        return
    setting = "do_sample=False" if not options.do_sample else "temperature 0"
    effective = active(stages, greedy=True)
    for stage in stages:
        idle = isinstance(stage, XTC) and stage not in effective
        if stage.must_be_last or isinstance(stage, DynamicTemperature) or idle:
            raise ValueError(
                f"{stage.name} has no effect with {setting}, which always takes the best token"
            )
