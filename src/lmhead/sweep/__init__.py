"""`SweptScores`: hidden @ weight.T in one pass over tiles of the vocabulary, many answers.

In:  a `Source` (hidden states, weight, bias, elementwise map) and what is asked of its logits.
Out: sums per row (differentiable), exact decisions, or a loss with its gradients.
May be called by: `screen`, `vocab`, `lazy`, `head` and the packages below them.

Read in this order: `kernels`, `source`, `questions`, `exact_decisions`, `chunk`,
`filter`, `run_sweep`, `swept_scores`.
"""

from lmhead.scores.row_loss import RowLoss
from lmhead.sweep.equal_rows import EqualRows
from lmhead.sweep.kernels import Pointwise
from lmhead.sweep.questions import (
    DEFAULT_MAX_BYTES,
    Decisions,
    FilterReport,
    GradFilter,
    Plan,
    Questions,
    as_filter,
)
from lmhead.sweep.run_sweep import row_answers, total_loss
from lmhead.sweep.source import Source, accumulation_dtype
from lmhead.sweep.swept_scores import SweptScores, autocast, linear_scores

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Decisions",
    "EqualRows",
    "FilterReport",
    "GradFilter",
    "Plan",
    "Pointwise",
    "Questions",
    "RowLoss",
    "Source",
    "SweptScores",
    "accumulation_dtype",
    "as_filter",
    "autocast",
    "linear_scores",
    "row_answers",
    "total_loss",
]
