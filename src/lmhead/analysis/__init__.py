"""Looking at a model through its head: what a page, a script or a command wants to show.

In:  a `LanguageModel`, and text or ids.
Out: dataclasses with `.to_json()`.

    reading     text to ids to hidden states; long texts portion by portion
    tokens      a token as people and programs see it
    next_words  the next-word distribution, and what a sampler makes of it
    score       how well a model expects a text
    lens        what the head would say after each layer
    compare     two models, or two samplers, along a text
    comparison  what that finds, place by place and in all
    same_words  whether two models can be compared at all
    screened    generation through certified decode, with its report
"""

from lmhead.analysis.compare import compare_models, compare_samplers
from lmhead.analysis.comparison import Comparison, Difference
from lmhead.analysis.lens import Cell, Lens, logit_lens
from lmhead.analysis.next_words import NextWords, Processed, next_words
from lmhead.analysis.same_words import DifferentWords
from lmhead.analysis.score import Score, ScoredToken, score
from lmhead.analysis.screened import ScreenedSampler, ScreenReport
from lmhead.analysis.tokens import Piece, Token

__all__ = [
    "Cell",
    "Comparison",
    "Difference",
    "DifferentWords",
    "Lens",
    "NextWords",
    "Piece",
    "Processed",
    "Score",
    "ScoredToken",
    "ScreenReport",
    "ScreenedSampler",
    "Token",
    "compare_models",
    "compare_samplers",
    "logit_lens",
    "next_words",
    "score",
]
