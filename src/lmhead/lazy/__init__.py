"""`LazyLogits`: a tensor-like handle on `Scores` plus recorded operations.

In:  `Scores` of a head, then whatever torch is asked to do with its logits.
Out: answers, each computed a few rows at a time; the tensor where nothing else will do.

    logits           the object: a view of a program, in-place changes
    assignment       writes: another program for all views
    dense_logits     logits that become a tensor, and the memory that views of it share
    building, memory how all rows are computed, where they are kept
    program          what has been done so far, as a tree of nodes
    row_nodes        nodes that join, choose or replace rows
    replay           evaluation of programs, forward and backward, in bounded memory
    routing          how answers join the autograd graph
    torch_function   the table from torch's functions to what they do here
    handlers         of functions that need a few lines
    dense_calls      functions without a handler, and calls from C++: on the tensor
    recording        pointwise operations
    views, indexing  shapes, selections, assignments
    reductions, row_functions, torch_losses, written_divergences, bitmask
    lazy_query, column
"""

from lmhead.lazy import torch_function
from lmhead.lazy.logits import LazyLogits

__all__ = ["LazyLogits", "torch_function"]
