"""`SweptScores`: hidden @ weight.T in one pass over tiles of the vocabulary, many answers.

In:  a `Source` (hidden states, weight, bias, elementwise map) and what is asked of its logits.
Out: sums per row (differentiable), exact decisions, or a loss with its gradients.
May be called by: `screen`, `vocab`, `lazy`, `head` and the packages below them.

Read in this order: `source`, `questions`, `plan`, `kernels`, `chunk`, `gradients`, `run_sweep`,
`small_vocab`, `exact_decisions`, `filter`, `autograd`, `swept_scores`.
"""

from lmhead.scores.row_loss import RowLoss
from lmhead.sweep.autograd import dense_answers, row_answers, total_loss
from lmhead.sweep.filter import FilterReport, GradFilter, as_filter
from lmhead.sweep.plan import DEFAULT_MAX_BYTES, Plan
from lmhead.sweep.pointwise import Pointwise
from lmhead.sweep.precision import accumulation_dtype
from lmhead.sweep.questions import Decisions, Questions
from lmhead.sweep.source import Source
from lmhead.sweep.swept_scores import SweptScores, autocast, linear_scores

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Decisions",
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
    "dense_answers",
    "linear_scores",
    "row_answers",
    "total_loss",
]
