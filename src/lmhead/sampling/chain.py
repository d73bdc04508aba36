"""Which chains make sense: refused when built, with the reason."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lmhead.sampling.cuts import XTC
from lmhead.sampling.edits import AllowedIds, ForcedTokens
from lmhead.sampling.options import Options
from lmhead.sampling.run import active
from lmhead.sampling.stage import Cut, Stage
from lmhead.sampling.temperature import DynamicTemperature, Temperature


def check_chain(stages: Sequence[Stage], options: Options) -> None:
    """Raise for a chain that cannot mean what it says."""
    cut: Stage | None = None
    last: Stage | None = None
    for number, stage in enumerate(stages):
        if not isinstance(stage, Stage):
            raise TypeError(f"stages must be stages; got {type(stage).__name__} at {number}")
        if last is not None and last.gives == "ids":
            raise ValueError(
                f"{stage.name} comes after {last.name}, which gives ids: nothing is left to do"
            )
        if cut is not None and isinstance(stage, AllowedIds | ForcedTokens):
            raise ValueError(
                f"{stage.name} comes after {cut.name}: the words it names may have been cut "
                f"already; put it first"
            )
        if stage.gives == "ids" and cut is not None:
            raise ValueError(
                f"{stage.name} finds its own cut, so {cut.name} before it would blind it"
            )
        if isinstance(stage, Cut | XTC):
            cut = stage
        last = stage
    for kind in (Temperature, DynamicTemperature):
        if sum(isinstance(s, kind) for s in stages) > 1:
            raise ValueError(f"{kind.name} is there twice: give their product once")
    cold = bool((torch.as_tensor(options.temperature, dtype=torch.float64) == 0).any())
    if not cold and options.do_sample:
        return
    why = "do_sample=False" if not options.do_sample else "temperature 0"
    counted = active(stages, greedy=True)
    for stage in stages:
        idle = isinstance(stage, XTC) and stage not in counted
        if stage.gives == "ids" or isinstance(stage, DynamicTemperature) or idle:
            raise ValueError(
                f"{stage.name} means nothing with {why}, which takes the best word every time"
            )
