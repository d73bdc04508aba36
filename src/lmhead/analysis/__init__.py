"""Analyses of a model through its head, as shown by the commands and the web page.

In:  a `LanguageModel`, and text or ids.
Out: dataclasses with `.to_json()`.

    token_text       text to ids to hidden states, in portions; ids to text
    next_tokens      the next-token distribution, before and after a sampler
    score            log-probability, rank and entropy of every token of a text
    score_file       the same for many texts, into a file
    score_workers    the same on several processes
    lens             logit lens: the head applied after each layer
    comparison       two models, or two samplers, along a text
    same_vocabulary  check that two models have the same tokens
"""

from lmhead.analysis.comparison import Comparison, Difference, compare_models, compare_samplers
from lmhead.analysis.lens import Cell, Lens, logit_lens
from lmhead.analysis.next_tokens import NextTokens, Processed, next_tokens
from lmhead.analysis.same_vocabulary import VocabularyMismatch
from lmhead.analysis.score import Score, ScoredToken, score
from lmhead.analysis.score_file import score_files
from lmhead.analysis.token_text import Piece, Token

__all__ = [
    "Cell",
    "Comparison",
    "Difference",
    "Lens",
    "NextTokens",
    "Piece",
    "Processed",
    "Score",
    "ScoredToken",
    "Token",
    "VocabularyMismatch",
    "compare_models",
    "compare_samplers",
    "logit_lens",
    "next_tokens",
    "score",
    "score_files",
]
