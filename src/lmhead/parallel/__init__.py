"""The head on `torch.distributed`: FSDP2, and vocabularies that are split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmhead.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lmhead.parallel.communication_plan import HeadPlan as HeadPlan
    from lmhead.parallel.communication_plan import plan as plan
    from lmhead.parallel.sharded_scores import ShardedScores as ShardedScores
    from lmhead.parallel.vocab_parallel import VocabParallel as VocabParallel

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "lmhead.parallel.communication_plan": ["HeadPlan", "plan"],
        "lmhead.parallel.sharded_scores": ["ShardedScores"],
        "lmhead.parallel.vocab_parallel": ["VocabParallel"],
    },
)
