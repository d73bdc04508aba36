"""Results of generation: a `TokenEvent` for each token, a `Generation` for each prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["eos", "stop", "length", "interrupted"]


@dataclass(frozen=True)
class TokenEvent:
    """One token of one row.

    Attributes:
        row: the number of the prompt.
        token: its id.
        text: text that is complete after this token. It may lag by an unfinished character or
            a possible stop string; the texts of all events form the whole text.
        log_prob: the model's log-probability of the token.
        top: the k most probable (id, log-probability), best first; empty unless asked for.
        sampler_log_prob: its log-probability after all stages; None without a sampler.
        finish_reason: None while the row continues; "eos" for one of the model's end-of-text
            tokens, "stop" for a stop string, a stop id or a completed grammar, "length" for the
            maximum length.
        stopped_by: the stop string or id; None for other reasons.
        log_prob_error: error bound of `log_prob` (unless `top` is asked for) and
            `sampler_log_prob`; above 0 only for a screened head.
        kept: ids that the sampler could have drawn; None if not asked for, or if it kept all.
    """

    row: int
    token: int
    text: str
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()
    sampler_log_prob: float | None = None
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    log_prob_error: float = 0.0
    kept: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Generation:
    """The result of one prompt.

    Attributes:
        prompt_ids: the prompt's ids.
        text: the new text, without the stop string; empty for a model without a tokenizer.
        finish_reason: as in `TokenEvent`, or "interrupted".
        events: one for each new token.
    """

    prompt_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    events: tuple[TokenEvent, ...]

    @property
    def tokens(self) -> list[int]:
        """The new ids, the one that ended the text included."""
        return [event.token for event in self.events]

    @property
    def log_probs(self) -> list[float]:
        """The model's log-probability of each token."""
        return [event.log_prob for event in self.events]

    @property
    def log_prob_error(self) -> float:
        """Error bound of the log-probabilities; above 0 only for a screened head."""
        return max((event.log_prob_error for event in self.events), default=0.0)

    @property
    def kept(self) -> tuple[list[int], list[int]]:
        """The ids that could have been drawn, as CSR arrays (token_ids, offsets).

        Token i came from token_ids[offsets[i] : offsets[i + 1]]: what `query(kept=...)` takes.
        """
        token_ids: list[int] = []
        offsets = [0]
        for event in self.events:
            if event.kept is None:
                raise ValueError(
                    "no kept ids: use return_kept=True and a sampler that truncates (top_k, top_p)"
                )
            token_ids += event.kept
            offsets.append(len(token_ids))
        return token_ids, offsets

    @property
    def stopped_by(self) -> str | int | None:
        """The stop string or id; None for other reasons."""
        return self.events[-1].stopped_by if self.events else None
