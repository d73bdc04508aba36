"""`next_tokens`: the next-token distribution after a prompt, before and after a sampler."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.analysis.token_text import (
    Piece,
    Text,
    Token,
    hidden_states,
    piece_of,
    pieces_of,
    prompt_ids,
)
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler, Step


@dataclass(frozen=True)
class Processed:
    """The distribution after a sampler's stages."""

    settings: str  # the sampler, as text
    kept: int  # number of tokens left
    mass: float  # the model's probability of the tokens left
    entropy: float  # of the remaining distribution, in nats
    steps: tuple[Step, ...]  # what each stage did
    token: Piece  # the token that the sampler chooses, with its seed

    def to_json(self) -> dict[str, Any]:
        """Return every attribute; `steps` without row numbers and ids."""
        omitted = ("row", "cut_ids")
        steps = [{k: v for k, v in asdict(s).items() if k not in omitted} for s in self.steps]
        steps = [step | {"words": step["kept"]} for step in steps]  # english: word
        return {
            "settings": self.settings,
            "kept": self.kept,
            "words": self.kept,  # english: word, the former name
            "mass": self.mass,
            "entropy": self.entropy,
            "steps": steps,
            "token": self.token.to_json(),
        }


@dataclass(frozen=True)
class NextTokens:
    """The distribution of the token after a prompt."""

    prompt: tuple[Piece, ...]  # the tokens of the prompt
    tokens: tuple[Token, ...]  # the best tokens, best first; with a sampler also its own best ones
    vocab_size: int  # size of the vocabulary
    entropy: float  # of the model's distribution, in nats
    mass: float  # the model's probability of all `tokens` together
    processed: Processed | None  # what the sampler did; None without one

    def to_json(self) -> dict[str, Any]:
        """Return `prompt`, `tokens` best first, `entropy`, `mass`, `processed`."""
        return {
            "prompt": [piece.to_json() for piece in self.prompt],
            "vocab_size": self.vocab_size,
            "entropy": self.entropy,
            "mass": self.mass,
            "processed": None if self.processed is None else self.processed.to_json(),
            "tokens": [token.to_json() for token in self.tokens],
        }


@torch.no_grad()
def next_tokens(
    model: LanguageModel,
    prompt: Text,
    *,
    top: int = 10,
    sampler: Sampler | None = None,
    prompt_length: int | None = None,
) -> NextTokens:
    """Return the most probable next tokens.

    Equivalent to: p = softmax(model.head(hidden of the last id)), then p.topk(top)

    Args:
        model: any `LanguageModel`.
        prompt: text, or ids.
        top: number of tokens. With a sampler, its own `top` best tokens are included too.
        sampler: sampler to apply to the distribution; a seed makes random cuts (XTC) repeatable.
        prompt_length: number of ids that are the prompt, for penalties that count only generated
            tokens; None for all.

    Raises:
        ValueError: an empty prompt, or one longer than the model's context.
    """
    checks.check_integer("top", top, low=1)
    ids = prompt_ids(model, prompt)
    if prompt_length is not None:
        checks.check_integer("prompt_length", prompt_length, low=0, high=len(ids))
    scores = model.head.scores(hidden_states(model, ids)[-1:])
    top = min(top, scores.vocab_size)
    result, sampler_best = None, torch.empty(0, dtype=torch.int64)
    if sampler is not None:
        result = _process(model, scores.row_logits().double(), ids, sampler, prompt_length)
        sampler_best = result.log_probs.topk(min(top, result.summary.kept)).indices
    answers = scores.answer(
        entropy=True, top_k=top, picked=sampler_best[None], rank=sampler_best[None]
    )
    best = answers.top_ids[0]
    new = ~torch.isin(sampler_best, best)
    logits = torch.cat((answers.top_values[0], answers.picked[0][new]))
    figures = (
        torch.cat((best, sampler_best[new])),
        logits,
        logits - answers.lse,
        torch.cat((torch.arange(top), answers.ranks[0][new])),
    )
    tokens = []
    for id, logit, log_prob, rank in zip(*(t.tolist() for t in figures), strict=True):
        processed = log_prob if result is None else float(result.log_probs[id])
        tokens.append(
            Token(
                piece_of(model, id, ids[-1]),
                logit=logit,
                log_prob=log_prob,
                processed_p=math.exp(processed),
                rank=rank,
                cut_by=None if result is None else result.cut_by.get(id),
            )
        )
    tokens.sort(key=lambda token: token.rank)
    return NextTokens(
        prompt=tuple(pieces_of(model, ids)),
        tokens=tuple(tokens),
        vocab_size=scores.vocab_size,
        entropy=float(answers.entropy[0]),
        mass=min(1.0, math.fsum(token.p for token in tokens)),
        processed=None if result is None else result.summary,
    )


@dataclass(frozen=True)
class _SamplerResult:
    log_probs: Tensor  # (V,), float64; -inf for removed tokens
    cut_by: dict[int, str]
    summary: Processed


def _process(
    model: LanguageModel, z: Tensor, ids: list[int], sampler: Sampler, prompt_length: int | None
) -> _SamplerResult:
    """Apply the sampler's stages to the logits z (1, V)."""
    vocab = z.shape[-1]
    explanation = sampler.explain(z, [ids], prompt_length=prompt_length, shown=vocab)
    steps, token = explanation.steps[0], explanation.tokens[0]
    cut_by = {id: step.stage for step in steps for id in step.cut_ids}
    if sampler.is_greedy:  # a single token is left
        stage = "do_sample" if not sampler.options.do_sample else "temperature"
        cut_by = {id: cut_by.get(id, stage) for id in range(vocab) if id != token}
        log_probs = torch.full((vocab,), -math.inf, dtype=torch.float64)
        log_probs[token] = 0.0
    else:
        log_probs = sampler.process(z, [ids], prompt_length=prompt_length)[0].log_softmax(-1)
    kept = log_probs > -math.inf
    p = log_probs[kept].exp()
    summary = Processed(
        settings=repr(sampler),
        kept=int(kept.sum()),
        mass=float(z[0].softmax(-1)[kept].sum().clamp(max=1.0)),
        entropy=float(-torch.xlogy(p, p).sum()) + 0.0,
        steps=steps,
        token=piece_of(model, token, ids[-1]),
    )
    return _SamplerResult(log_probs, cut_by, summary)
