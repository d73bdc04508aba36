"""Generation for users: `generate` all at once, `stream_generate` token by token.

Prompts of different lengths are padded on the left and read together; a row that is done is removed
from the batch. The logits are those of the last position, `model.head(hidden[:, -1])`: lazy, if the
head is an `LMHead`, so that choosing a token and its log-probabilities is one sweep over the
vocabulary. The loop itself is in `generation_loop`, text and stop strings are in `text`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from lmhead.sampling.arguments import Stop
from lmhead.sampling.events import Generation, TokenEvent
from lmhead.sampling.generation_loop import GenerationTask
from lmhead.sampling.grammar import Grammar
from lmhead.sampling.model import Model


@overload
def generate(
    model: Model,
    prompt: str | list[int],
    sampler: Callable[..., Any] | None = ...,
    *,
    max_new_tokens: int,
    stop: Stop | None = ...,
    logprobs: int = ...,
    eos_token_ids: Sequence[int] | None = ...,
    grammar: Grammar | None = ...,
    stream: Callable[[TokenEvent], object] | None = ...,
    return_kept: bool = ...,
) -> Generation: ...


@overload
def generate(
    model: Model,
    prompt: list[str] | list[list[int]] | list[str | list[int]],
    sampler: Callable[..., Any] | None = ...,
    *,
    max_new_tokens: int,
    stop: Stop | None = ...,
    logprobs: int = ...,
    eos_token_ids: Sequence[int] | None = ...,
    grammar: Grammar | None = ...,
    stream: Callable[[TokenEvent], object] | None = ...,
    return_kept: bool = ...,
) -> list[Generation]: ...


def generate(
    model: Model,
    prompt: Any,
    sampler: Callable[..., Any] | None = None,
    *,
    max_new_tokens: int,
    stop: Stop | None = None,
    logprobs: int = 0,
    eos_token_ids: Sequence[int] | None = None,
    grammar: Grammar | None = None,
    stream: Callable[[TokenEvent], object] | None = None,
    return_kept: bool = False,
) -> Generation | list[Generation]:
    """Generate tokens after a prompt, or after several prompts at once.

    Equivalent to: for each new token, logits = model.head(model.body(ids)[:, -1]), and the token is
    logits.argmax(-1), or sampler(logits, ids).token.

    The tokens of a row do not depend on the other rows: noise depends on its seed and position,
    padding is masked, and decisions are those of the exact logits. (The body's rounding
    may differ with the batch size; it matters only if two logits differ in the last digits.)

    Args:
        model: see `lmhead.sampling.model.Model`.
        prompt: text, or ids, or a list of either.
        sampler: called as sampler(logits (B, V), context, position, prompt_length=...,
            context_mask=..., state=...), gives `.token`, `.log_prob`, `.raw_log_prob`, `.state`;
            None for greedy.
        max_new_tokens: maximum number of new tokens per row.
        stop: a stop string, a stop id, or a list of both. A stop string is found also across
            tokens, and is not part of the text.
        logprobs: k, for the k most probable tokens of each position.
        eos_token_ids: in place of the model's; () to always generate `max_new_tokens`.
        grammar: what the new text must match, see `lmhead.sampling.Grammar`.
        stream: called with each `TokenEvent` as soon as it is generated.
        return_kept: whether `Generation.kept` is wanted: the ids that the sampler could have drawn
            for each token, for `lmhead.query(kept=...)`.

    Returns:
        A `Generation`, or a list of them for a list of prompts. Ctrl-C ends the generation, not the
        program: the tokens so far are returned, with the finish_reason "interrupted".

    Raises:
        ValueError, TypeError: an argument of the wrong type or range; no finite logit.

    >>> from types import SimpleNamespace
    >>> from lmhead import LMHead
    >>> from lmhead.nn import LlamaBody, LlamaConfig
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> body = LlamaBody(LlamaConfig(50, 16, 24, 2, 4, 2))
    >>> model = SimpleNamespace(
    ...     body=body, head=LMHead.tied(body.embedding), eos_token_ids=(), tokenizer=None
    ... )
    >>> generation = generate(model, [3, 1, 4], max_new_tokens=5, logprobs=2)
    >>> len(generation.tokens), generation.finish_reason, len(generation.events[0].top)
    (5, 'length', 2)
    """
    options = (max_new_tokens, stop, logprobs, eos_token_ids, grammar)
    task = GenerationTask(model, prompt, sampler, *options, return_kept=return_kept)
    # Only whole events are kept, so that an interruption leaves no partial event.
    events_by_row: list[list[TokenEvent]] = [[] for _ in task.prompts]
    interrupted = False
    try:
        for event in task.run():
            events_by_row[event.row].append(event)
            if stream is not None:
                stream(event)
    except KeyboardInterrupt:
        interrupted = True
    rows = [task.result(row, events, interrupted) for row, events in enumerate(events_by_row)]
    return rows[0] if task.single else rows


def stream_generate(
    model: Model,
    prompt: str | list[int] | list[str] | list[list[int]] | list[str | list[int]],
    sampler: Callable[..., Any] | None = None,
    *,
    max_new_tokens: int,
    stop: Stop | None = None,
    logprobs: int = 0,
    eos_token_ids: Sequence[int] | None = None,
    grammar: Grammar | None = None,
) -> Iterator[TokenEvent]:
    """Yield a `TokenEvent` for each token of each row as soon as it is generated.

    Equivalent to: the events of `generate`, in the order in which they are generated.

    Arguments are those of `generate`, and are checked by the call itself, before iteration. Nothing
    is computed ahead: to stop early, leave the loop or call `.close()`.

    >>> from types import SimpleNamespace
    >>> from lmhead import LMHead
    >>> from lmhead.nn import LlamaBody, LlamaConfig
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> body = LlamaBody(LlamaConfig(50, 16, 24, 2, 4, 2))
    >>> model = SimpleNamespace(
    ...     body=body, head=LMHead.tied(body.embedding), eos_token_ids=(), tokenizer=None
    ... )
    >>> events = stream_generate(model, [[3, 1, 4], [1]], max_new_tokens=2)
    >>> [event.row for event in events]
    [0, 1, 0, 1]
    """
    return GenerationTask(
        model, prompt, sampler, max_new_tokens, stop, logprobs, eos_token_ids, grammar
    ).run()
