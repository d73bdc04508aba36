"""`Scores`: what every head can answer about its (rows × vocabulary) matrix of logits.

In:  questions about rows of logits that are never built.
Out: answers, losses, chosen columns, dense rows.
May be called by: every package below; losses, samplers and `LazyLogits` use nothing else.
"""

from lmhead.scores.dense_scores import DenseScores
from lmhead.scores.protocol import RowAnswers, Rows, Scores, TopRows

__all__ = ["DenseScores", "RowAnswers", "Rows", "Scores", "TopRows"]
