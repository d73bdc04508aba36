"""`next_words`: the next-word distribution behind a prompt, and what a sampler makes of it.

In:  a model, a prompt, perhaps a sampler.
Out: `NextWords`: the best words with logit, probability, what is left of it, and what cut it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.analysis.reading import Text, prompt_ids, read_hidden
from lmhead.analysis.tokens import Piece, Token, piece_of, pieces_of
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler, Step
from lmhead.sweep import whole_row


@dataclass(frozen=True)
class Processed:
    """What a sampler's stages left.

    Attributes:
        settings: the sampler, as text.
        words: how many words are left.
        mass: how much of the model's probability they have.
        entropy: of what is left, in nats.
        steps: what each stage did.
        token: the token that the sampler gives, with its seed.
    """

    settings: str
    words: int
    mass: float
    entropy: float
    steps: tuple[Step, ...]
    token: Piece

    def to_json(self) -> dict[str, Any]:
        """Every attribute; `steps` without row numbers and ids."""
        left_out = ("row", "cut_ids")
        steps = [{k: v for k, v in asdict(s).items() if k not in left_out} for s in self.steps]
        return {
            "settings": self.settings,
            "words": self.words,
            "mass": self.mass,
            "entropy": self.entropy,
            "steps": steps,
            "token": self.token.to_json(),
        }


@dataclass(frozen=True)
class NextWords:
    """The distribution of the word behind a prompt.

    Attributes:
        prompt: the tokens of the prompt.
        tokens: the best words, best first; with a sampler also its own best ones.
        vocab_size: how many words there are.
        entropy: of the model's distribution, in nats.
        mass: how much of the model's probability `tokens` have.
        processed: what a sampler did; None without one.
    """

    prompt: tuple[Piece, ...]
    tokens: tuple[Token, ...]
    vocab_size: int
    entropy: float
    mass: float
    processed: Processed | None

    def to_json(self) -> dict[str, Any]:
        """`prompt`, `tokens` best first, `entropy`, `mass`, `processed`."""
        return {
            "prompt": [piece.to_json() for piece in self.prompt],
            "vocab_size": self.vocab_size,
            "entropy": self.entropy,
            "mass": self.mass,
            "processed": None if self.processed is None else self.processed.to_json(),
            "tokens": [token.to_json() for token in self.tokens],
        }


@torch.no_grad()
def next_words(
    model: LanguageModel,
    prompt: Text,
    *,
    top: int = 10,
    sampler: Sampler | None = None,
    prompt_length: int | None = None,
) -> NextWords:
    """The most probable next words.

    Equivalent to: p = softmax(model.head(hidden of the last id)), then p.topk(top)

    Args:
        model: any `LanguageModel`.
        prompt: text, or ids.
        top: how many words. With a sampler, those of its `top` best words that are not among them
            come too, each in its place.
        sampler: what to apply to the distribution; a seed makes random cuts (XTC) repeatable.
        prompt_length: how many of the tokens are the prompt, for penalties that count only what was
            written behind it; None for all.

    Raises:
        ValueError: no token in the prompt, or more than the model can see at once.
    """
    checks.check_whole("top", top, low=1)
    ids = prompt_ids(model, prompt)
    if prompt_length is not None:
        checks.check_whole("prompt_length", prompt_length, low=0, high=len(ids))
    last = read_hidden(model, ids)[-1:]
    logits = model.head(last).double()  # answers in float64
    top = min(top, logits.shape[-1])
    answers = logits.ask(top_k=top, entropy=True, logsumexp=True)
    assert answers.top_k is not None
    assert answers.entropy is not None
    assert answers.logsumexp is not None
    values, best_ids = (side[0] for side in answers.top_k)
    chosen, found = best_ids, None
    if sampler is not None:
        row = whole_row(logits.source(), 0).double()[None]
        found = _process(model, row, ids, sampler, prompt_length)
        best = found.log_probs.topk(min(top, found.summary.words)).indices
        chosen = torch.cat((chosen, best[~torch.isin(best, chosen)]))
    exact = logits.ask(log_prob=chosen[None], rank=chosen[None])
    assert exact.log_prob is not None
    assert exact.rank is not None
    scores = exact.log_prob[0] + answers.logsumexp
    scores[: len(values)] = values
    tokens = []
    for id, score, log_prob, rank in zip(
        *(t.tolist() for t in (chosen, scores, exact.log_prob[0], exact.rank[0])), strict=True
    ):
        left = log_prob if found is None else float(found.log_probs[id])
        tokens.append(
            Token(
                piece_of(model, id, ids[-1]),
                logit=score,
                log_prob=log_prob,
                processed_p=math.exp(left),
                rank=rank,
                cut_by=None if found is None else found.cut_by.get(id),
            )
        )
    tokens.sort(key=lambda token: token.rank)
    return NextWords(
        prompt=tuple(pieces_of(model, ids)),
        tokens=tuple(tokens),
        vocab_size=logits.shape[-1],
        entropy=float(answers.entropy[0]),
        mass=min(1.0, math.fsum(token.p for token in tokens)),
        processed=None if found is None else found.summary,
    )


@dataclass(frozen=True)
class _Found:
    log_probs: Tensor  # (V,), float64; -inf for words that were cut
    cut_by: dict[int, str]
    summary: Processed


def _process(
    model: LanguageModel, z: Tensor, ids: list[int], sampler: Sampler, prompt_length: int | None
) -> _Found:
    """What the stages make of the logits z (1, V)."""
    vocab = z.shape[-1]
    explanation = sampler.explain(z, [ids], prompt_length=prompt_length, shown=vocab)
    steps, token = explanation.steps[0], explanation.tokens[0]
    cut_by = {id: step.stage for step in steps for id in step.cut_ids}
    if sampler.is_greedy:  # one word is left, whatever the stages leave
        stage = "do_sample" if not sampler.options.do_sample else "temperature"
        cut_by = {id: cut_by.get(id, stage) for id in range(vocab) if id != token}
        log_probs = torch.full((vocab,), -math.inf, dtype=torch.float64)
        log_probs[token] = 0.0
    else:
        log_probs = sampler.process(z, [ids], prompt_length=prompt_length)[0].log_softmax(-1)
    left = log_probs > -math.inf
    p = log_probs[left].exp()
    summary = Processed(
        settings=repr(sampler),
        words=int(left.sum()),
        mass=float(z[0].softmax(-1)[left].sum().clamp(max=1.0)),
        entropy=float(-torch.xlogy(p, p).sum()) + 0.0,
        steps=steps,
        token=piece_of(model, token, ids[-1]),
    )
    return _Found(log_probs, cut_by, summary)
