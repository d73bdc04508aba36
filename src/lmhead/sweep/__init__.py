"""One pass over vocabulary tiles, many answers.

In:  a `Source` (hidden states, weight, bias, elementwise map) and `Questions` about its logits.
Out: `RowAnswers` (differentiable, one entry per token), `Decisions` (whole numbers, exact), or a
     loss with its gradients.
May be called by: `head`, `logits`, `functional` and the rooms below them.

Read in this order: `source`, `questions`, `loss`, `plan`, `kernels`, `chunk`, `gradients`, `run`,
`few`, `exact`, `filter`, `autograd`, `decode`.
"""

from lmhead.sweep.autograd import dense_answers, row_answers, total_loss
from lmhead.sweep.decode import top_of_rows, whole_row
from lmhead.sweep.filter import FilterReport, GradFilter
from lmhead.sweep.loss import RowLoss
from lmhead.sweep.plan import DEFAULT_MAX_BYTES, Plan
from lmhead.sweep.pointwise import Pointwise
from lmhead.sweep.precision import accumulation_dtype
from lmhead.sweep.questions import Decisions, Questions, RowAnswers
from lmhead.sweep.source import Source

__all__ = [
    "DEFAULT_MAX_BYTES",
    "Decisions",
    "FilterReport",
    "GradFilter",
    "Plan",
    "Pointwise",
    "Questions",
    "RowAnswers",
    "RowLoss",
    "Source",
    "accumulation_dtype",
    "dense_answers",
    "row_answers",
    "top_of_rows",
    "total_loss",
    "whole_row",
]
