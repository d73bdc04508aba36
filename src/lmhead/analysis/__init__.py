"""Looking at a model through its head: what a page, a script or a command wants to show.

In:  a `LanguageModel`, and text or ids.
Out: dataclasses with `.to_json()`.

    reading     text to ids to hidden states; long texts portion by portion
    tokens      a token as people and programs see it
    next_words  the next-word distribution, and what a sampler makes of it
"""

from lmhead.analysis.next_words import NextWords, next_words
from lmhead.analysis.tokens import Piece, Token

__all__ = ["NextWords", "Piece", "Token", "next_words"]
