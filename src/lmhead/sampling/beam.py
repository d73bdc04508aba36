"""`beam_search`: keep the best few sequences at every step, and return the best that end.

In:  a model, prompts, the number of beams, scoring and stopping options.
Out: `Beams`, per prompt the n best continuations and their scores.

`beam_tokens` finds the best next tokens of every beam, `beam_groups` selects the next beams.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lmhead import checks
from lmhead.sampling.beam_groups import Candidate, Group, Hypothesis, Rules
from lmhead.sampling.beam_tokens import ProcessedTokens, Processor, TopTokens, rank
from lmhead.sampling.model import Model

Prompt = Tensor | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Beams:
    """Results of `beam_search`, best first for each prompt.

    Attributes:
        sequences: per prompt a list of sequences, each a list of new ids, the end included.
        scores: per prompt a list of scores, Σ log p / length ** length_penalty.
        steps: number of calls of the body.
    """

    sequences: list[list[list[int]]]
    scores: list[list[float]]
    steps: int

    @property
    def best(self) -> list[list[int]]:
        """The best sequence of each prompt."""
        return [sequences[0] for sequences in self.sequences]


def beam_search(
    model: Model,
    prompt: Prompt,
    *,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    num_beam_groups: int = 1,
    diversity_penalty: float = 0.0,
    num_return_sequences: int = 1,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    processor: Processor | None = None,
) -> Beams:
    """Return the continuations with the highest score that a search with `num_beams` beams finds.

    Equivalent to: transformers' model.generate(do_sample=False, num_beams=num_beams, ...)

    Args:
        model: a `Model`: body, head, eos_token_ids.
        prompt: ids (B, L), or B lists of ids of any lengths, which are padded on the left and put
            on torch's default device.
        num_beams: number of sequences kept at each step; 1 is greedy search.
        max_new_tokens: maximum number of new ids.
        length_penalty: a sequence of n new ids has the score Σ log p / n ** length_penalty; above 0
            favours long sequences, below 0 short ones.
        early_stopping: when to stop after `num_beams` sequences have ended. True: at once. False:
            when the best beam, if it ended now, would not be better than the worst of them.
            "never": when it could not be at any length.
        num_beam_groups: groups of beams that search one after the other at each step, and avoid
            each other's tokens (diverse beam search).
        diversity_penalty: subtracted from a token for each beam of an earlier group that chose it
            at the same step. Scores include it.
        num_return_sequences: number of sequences per prompt to return; fewer if only fewer
            exist.
        eos_token_id: the ids that end a sequence, None for `model.eos_token_ids`, [] for none.
        pad_token_id: in a `prompt` tensor, such ids at the start of a row are padding.
        processor: changes the log-probabilities (R, V) before tokens are chosen, for instance a
            `Sampler` with a repetition penalty. With one beam it sees the logits, as in greedy
            search. It costs a tensor of that size, which is not built otherwise.

    Returns:
        `Beams`.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range; a head or a processor
            that gives NaN; a processor that leaves a prompt without any sequence.

    >>> class Chain:  # a model whose next token depends on the last one only
    ...     eos_token_ids, tokenizer = (3,), None
    ...     def body(self, ids, cache, mask):
    ...         return torch.nn.functional.one_hot(ids, 4).double(), self
    ...     def head(self, hidden):
    ...         p = [[0, .5, .4, .1], [.3, .3, .3, .1], [0, .1, 0, .9], [0, 0, 0, 1]]
    ...         return hidden @ torch.tensor(p).double().log().clamp(min=-99)
    ...     def select(self, rows):
    ...         return self
    >>> beam_search(Chain(), [[0]], num_beams=2, max_new_tokens=4).sequences
    [[[2, 3]]]
    """
    options: dict[str, Any] = {
        "num_beams": num_beams,
        "max_new_tokens": max_new_tokens,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "num_beam_groups": num_beam_groups,
        "diversity_penalty": diversity_penalty,
        "num_return_sequences": num_return_sequences,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "processor": processor,
    }
    return deque(stream_beam_search(model, prompt, **options), maxlen=1).pop()


@torch.no_grad()
def stream_beam_search(
    model: Model,
    prompt: Prompt,
    *,
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    num_beam_groups: int = 1,
    diversity_penalty: float = 0.0,
    num_return_sequences: int = 1,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    processor: Processor | None = None,
) -> Iterator[Beams]:
    """Yield the best sequence so far after each step; the last `Beams` is that of `beam_search`.

    Equivalent to: beam_search(...), step by step

    Arguments and errors are those of `beam_search`. A sequence that has not ended has the score
    that it would have if it ended now.
    """
    checks.check_integer("num_beams", num_beams, low=1)
    checks.check_integer("max_new_tokens", max_new_tokens, low=1)
    checks.check_integer("num_return_sequences", num_return_sequences, low=1, high=num_beams)
    checks.check_number("length_penalty", length_penalty)
    _check_groups(num_beams, num_beam_groups, diversity_penalty)
    if early_stopping is not True and early_stopping is not False and early_stopping != "never":
        raise ValueError(f"early_stopping must be False, True or 'never'; got {early_stopping!r}")
    if processor is not None and not callable(getattr(processor, "process", None)):
        raise TypeError(f"processor must have a method process; got {type(processor).__name__}")
    eos = _eos_ids(model.eos_token_ids if eos_token_id is None else eos_token_id)
    if pad_token_id is not None:
        checks.check_integer("pad_token_id", pad_token_id, low=0)
    ids, mask = _read_prompt(prompt, pad_token_id)

    rules = Rules(
        size=num_beams // num_beam_groups,
        eos=frozenset(eos),
        max_new_tokens=max_new_tokens,
        length_penalty=length_penalty,
        # One beam: the first sequence that ends is what greedy search returns.
        early_stopping=True if num_beams == 1 else early_stopping,
        diverse=num_beam_groups > 1,
    )
    if pad_token_id is None:
        pad_token_id = eos[0] if eos else 0
    search = _Search(model, rules, num_beam_groups, diversity_penalty, pad_token_id, processor)
    prompts = [[Group(rules) for _ in range(num_beam_groups)] for _ in ids]
    for steps, done in search.steps(prompts, ids, mask):
        best = [
            _best(groups, num_return_sequences, index) if done else _best_so_far(groups)
            for index, groups in enumerate(prompts)
        ]
        yield Beams(
            sequences=[[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in best],
            scores=[[hypothesis.score for hypothesis in hypotheses] for hypotheses in best],
            steps=steps,
        )


@dataclass(frozen=True)
class _Search:
    """Run body, head, best tokens and groups until every prompt is done."""

    model: Model
    rules: Rules
    num_groups: int
    diversity_penalty: float
    pad: int
    processor: Processor | None

    def steps(
        self, prompts: list[list[Group]], ids: Tensor, mask: Tensor
    ) -> Iterator[tuple[int, bool]]:
        """Search until every group of every prompt is done; yield the steps so far, and the end.

        A row of the batch is a beam. At first there is one per prompt, which all its groups share;
        then there are `num_groups` x `size`, and prompts that are done are removed.
        """
        context, lengths, cache = ids, mask.sum(-1), None
        steps, live = 0, prompts
        while True:
            hidden, cache = self.model.body(ids, cache, mask)
            if hidden.shape[:2] != ids.shape:
                raise ValueError(
                    f"model.body must give hidden states {(*ids.shape, 'D')} for ids "
                    f"{tuple(ids.shape)}; got {tuple(hidden.shape)}"
                )
            candidates = self._candidates(self.model.head(hidden[:, -1]), context, mask, lengths)
            parents, tokens = self._step(candidates, live, context.device)
            steps += 1
            unfinished = [p for p, groups in enumerate(live) if not all(g.done for g in groups)]
            yield steps, not unfinished
            if not unfinished:
                return
            live = [live[p] for p in unfinished]
            rows, ids = parents[unfinished].flatten(), tokens[unfinished].reshape(-1, 1)
            cache = cache.select(rows)
            context, lengths = torch.cat([context[rows], ids], 1), lengths[rows]
            mask = torch.cat([mask[rows], torch.ones_like(ids, dtype=torch.bool)], 1)

    def _candidates(
        self, logits: Any, context: Tensor, mask: Tensor, lengths: Tensor
    ) -> TopTokens | ProcessedTokens:
        # A beam needs `size` tokens that continue it, besides the end tokens and those that
        # diversity_penalty lowers.
        count = self.num_groups * self.rules.size + len(self.rules.eos)
        if self.processor is None:
            return TopTokens(logits, count, self.diversity_penalty)
        return ProcessedTokens(
            logits,
            count,
            self.diversity_penalty,
            self.processor,
            normalize_last=self.num_groups * self.rules.size == 1,
            context=context,
            context_mask=mask,
            prompt_length=lengths,
        )

    def _step(
        self, candidates: TopTokens | ProcessedTokens, live: list[list[Group]], device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Advance all groups in order; return the parent row and the token of each new beam.

        Both (P, num_groups x size) for the P live prompts.
        """
        size, width = self.rules.size, len(live[0][0].beams)
        per_prompt = self.num_groups * size if live[0][0].beams[0] else 1
        starts = per_prompt * torch.arange(len(live), device=device)[:, None]
        # As in transformers: a group that is done keeps choosing padding.
        idle = [Candidate(-math.inf, 0, self.pad)] * size
        parents: list[list[int]] = [[] for _ in live]
        chosen: list[list[int]] = [[] for _ in live]
        for g in range(self.num_groups):
            first = g * size if per_prompt > 1 else 0
            rows = starts + first + torch.arange(width, device=device)
            chosen_tokens = torch.tensor(chosen, dtype=torch.int64, device=device)
            scores, ids = candidates.best(rows.flatten(), chosen_tokens.repeat_interleave(width, 0))
            totals = torch.tensor([groups[g].totals for groups in live], dtype=torch.float64)
            ranked = rank(totals.to(device), *(t.reshape(*rows.shape, -1) for t in (scores, ids)))
            for p, groups in enumerate(live):
                beams = idle if groups[g].done else groups[g].advance(ranked[p])
                parents[p] += [p * per_prompt + first + candidate.beam for candidate in beams]
                chosen[p] += [candidate.token for candidate in beams]
        tokens = torch.tensor(chosen, device=device).clamp(min=0)  # an unused beam (-1) gets id 0
        return torch.tensor(parents, device=device), tokens


def _best_so_far(groups: list[Group]) -> list[Hypothesis]:
    """Return the best sequence; the score of an unfinished one is as if it ended now."""
    hypotheses = [hypothesis for group in groups for hypothesis in group.ended]
    for group in groups:
        score = group.rules.score
        pairs = zip(group.totals, group.beams, strict=True)
        hypotheses += [Hypothesis(score(total, len(beam)), beam) for total, beam in pairs]
    return [max(hypotheses, key=lambda hypothesis: hypothesis.score)]


def _best(groups: list[Group], count: int, index: int) -> list[Hypothesis]:
    """Return the best sequences of all groups together."""
    ended = sorted((h for group in groups for h in group.ended), key=lambda h: -h.score)
    if not ended:
        raise ValueError(
            f"processor must leave a sequence to return; it removed all sequences of prompt {index}"
        )
    return ended[:count]


def _check_groups(num_beams: int, num_beam_groups: int, diversity_penalty: float) -> None:
    checks.check_integer("num_beam_groups", num_beam_groups, low=1, high=num_beams)
    if num_beams % num_beam_groups:
        raise ValueError(
            f"num_beam_groups must divide num_beams; got {num_beam_groups} groups of {num_beams}"
        )
    checks.check_number("diversity_penalty", diversity_penalty, low=0.0)
    if (diversity_penalty > 0) != (num_beam_groups > 1):
        wanted = "above 0, or all groups are the same" if num_beam_groups > 1 else "0"
        raise ValueError(
            f"diversity_penalty must be {wanted}, with num_beam_groups={num_beam_groups}; "
            f"got {diversity_penalty}"
        )


def _eos_ids(eos_token_id: int | Sequence[int]) -> list[int]:
    ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    for token in ids:
        checks.check_integer("eos_token_id", token, low=0)
    return ids


def _read_prompt(prompt: Prompt, pad: int | None) -> tuple[Tensor, Tensor]:
    """Return ids (B, L) padded on the left, and the mask (B, L) that is False for padding."""
    if isinstance(prompt, Tensor):
        checks.check_id_type("prompt", prompt)
        if prompt.dim() != 2 or prompt.numel() == 0:
            raise ValueError(
                f"prompt must have shape (B, L), B and L at least 1; got {tuple(prompt.shape)}"
            )
        mask = torch.ones_like(prompt, dtype=torch.bool)
        if pad is not None:
            mask = (prompt != pad).cumsum(-1) > 0
            empty = (~mask[:, -1]).nonzero().flatten().tolist()
            if empty:
                raise ValueError(
                    f"prompt must hold an id that is not padding; row {empty[0]} has none"
                )
        return prompt.long(), mask
    if not prompt or any(isinstance(row, int) for row in prompt):
        raise TypeError("prompt must be a tensor (B, L) or a list of lists of ids")
    lengths = [len(row) for row in prompt]
    if min(lengths) == 0:
        raise ValueError(f"prompt must hold no empty list; got one at index {lengths.index(0)}")
    longest = max(lengths)
    fill = 0 if pad is None else pad
    ids = torch.tensor([[fill] * (longest - len(row)) + list(row) for row in prompt])
    checks.check_id_type("prompt", ids)
    missing = longest - torch.tensor(lengths, device=ids.device)
    return ids, torch.arange(longest, device=ids.device) >= missing[:, None]
