"""The bookkeeping of beam search: which sequences continue, which have ended, when to stop.

A `Group` is one beam search of one prompt, with beams of its own. Plain beam search has one group
per prompt; diverse beam search has several, which see each other only through the scores.

In:  candidates, best first, each a beam and the token to add to it.
Out: the candidates that become the next beams, and the best sequences that have ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Rules:
    """Settings shared by the groups of a search."""

    size: int  # beams per group, and number of ended sequences that a group keeps
    eos: frozenset[int]  # the ids that end a sequence
    max_new_tokens: int  # length at which every sequence ends
    length_penalty: float  # exponent of the length in `score`
    early_stopping: bool | Literal["never"]  # see `Group.cannot_improve`
    # Whether there are other groups. Transformers had one implementation for each case; they
    # differ in when a group stops, see `Group.advance`.
    diverse: bool

    def score(self, total: float, length: int) -> float:
        """Return Σ log p / length ** length_penalty."""
        return float(total / length**self.length_penalty)


class Candidate(NamedTuple):
    """A beam extended by a token; `total` is the sum of log-probabilities, that token included."""

    total: float
    beam: int
    token: int


class Hypothesis(NamedTuple):
    """A sequence that has ended, and its score."""

    score: float
    tokens: list[int]


class Group:
    """The beams of one search and the sequences that have ended in it.

    Attributes:
        totals: the sum of log-probabilities of each beam; -inf for a beam that does not exist.
        beams: the new ids of each beam.
        ended: the best sequences that have ended, best first, at most `rules.size`.
        done: whether the search has ended.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.totals: list[float] = [0.0]
        self.beams: list[list[int]] = [[]]
        self.ended: list[Hypothesis] = []
        self.done = False

    def advance(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the next `size` beams, given candidates, best first.

        Where there are fewer, candidates with the token -1 and the total -inf are added.
        """
        rules, length = self.rules, len(self.beams[0]) + 1
        last = length == rules.max_new_tokens
        possible = [c for c in candidates if c.total > -math.inf]
        # A sequence may end only among the best `size`; lower candidates only continue beams.
        best = possible[: rules.size]
        unfinished = [c for c in possible if c.token not in rules.eos][: rules.size]
        if last and not rules.diverse:
            self._end(best)
        else:
            self._end([c for c in best if c.token in rules.eos])
        # Transformers' group search bounds future scores by the best candidate, ended or not, and
        # tests whether it is done before it adds the sequences that end by the maximum length.
        ahead = possible if rules.diverse else unfinished
        self.done = not ahead or self.cannot_improve(ahead[0].total, length)
        if last and rules.diverse and not self.done:
            self._end(unfinished)
        self.done = self.done or last or not unfinished

        unfinished += [Candidate(-math.inf, 0, -1)] * (rules.size - len(unfinished))
        self.totals = [c.total for c in unfinished]
        self.beams = [[*self.beams[c.beam], c.token] for c in unfinished]
        return unfinished

    def cannot_improve(self, best_total: float, length: int) -> bool:
        """Return whether to stop: there are enough ended sequences, and `early_stopping` agrees.

        True: at once. False: when the best beam, if it ended now, would not be better than the
        worst of them. "never": when it would not be better at the length that favours it most.
        """
        rules = self.rules
        if len(self.ended) < rules.size:
            return False
        if rules.early_stopping is True:
            return True
        if rules.early_stopping == "never" and rules.length_penalty > 0:
            length = rules.max_new_tokens
        return rules.score(best_total, length) <= self.ended[-1].score

    def _end(self, candidates: list[Candidate]) -> None:
        """Add sequences, and keep the best; among equals the first to end."""
        for total, beam, token in candidates:
            tokens = [*self.beams[beam], token]
            self.ended.append(Hypothesis(self.rules.score(total, len(tokens)), tokens))
        self.ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self.ended[self.rules.size :]
