"""`LazyLogits`, what `head(hidden)` returns: the manners of a tensor, and nothing computed.

In:  hidden states (..., D), the rows of a weight (V, D), a bias, an elementwise map.
Out: answers, each from one sweep: a loss, log-probabilities, an argmax, a top-k, a sample.

    lazy         the object, from three parts, and its operators
    unbuilt      what it is made of, what it looks like, and how all of it is built
    shaped       its leading dimensions, type and place
    answering    softmax, and the questions that a sweep answers
    rows         what decoding asks, row by row
    selection    logits[index]
    arithmetic   scale, shift, soft-capping, masks
    spelling     torch's own functions, each the question it means
    transposed   (N, V, L), as `F.cross_entropy` wants sequences
"""

from lmhead.logits.lazy import LazyLogits
from lmhead.logits.rows import Rows
from lmhead.logits.unbuilt import Screen

__all__ = ["LazyLogits", "Rows", "Screen"]
