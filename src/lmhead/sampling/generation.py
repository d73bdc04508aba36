"""Generation for users: `generate` all at once, `stream_generate` token by token.

Prompts of different lengths are padded on the left and read together; a row that is done leaves the
batch. The logits are those of the last position, `model.head(hidden[:, -1])`: lazy, if the head is
ours, so that choosing a token and its log-probabilities is one sweep over the vocabulary. The loop
itself is in `loop`, text and stop strings are in `text`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from lmhead.sampling.arguments import Stop
from lmhead.sampling.events import Generation, TokenEvent
from lmhead.sampling.loop import Task
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
    stream: Callable[[TokenEvent], object] | None = ...,
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
    stream: Callable[[TokenEvent], object] | None = ...,
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
    stream: Callable[[TokenEvent], object] | None = None,
) -> Generation | list[Generation]:
    """Go on from a prompt, or from several at once.

    Equivalent to: for each new token, logits = model.head(model.body(ids)[:, -1]), and the token is
    logits.argmax(-1), or sampler(logits, ids).token.

    A row gives the tokens it gives alone, whatever stands beside it: noise belongs to a seed and a
    position, padding is not seen, and decisions are those of the exact logits. (The body's rounding
    may differ with the size of a batch; it decides where two words are equal to the last digits.)

    Args:
        model: see `lmhead.sampling.model.Model`.
        prompt: text, or ids, or a list of either.
        sampler: called as sampler(logits (B, V), context, position, prompt_length=...,
            context_mask=..., state=...), gives `.token`, `.log_prob`, `.raw_log_prob`, `.state`;
            None for greedy.
        max_new_tokens: the most tokens of a row.
        stop: a stop string, a stop id, or a list of both. A stop string is found also across
            tokens, and is not part of the text.
        logprobs: k, for the k most probable words of each position.
        eos_token_ids: in place of the model's; () to go on to the end of `max_new_tokens`.
        stream: called with each `TokenEvent`, as it comes.

    Returns:
        A `Generation`, or a list of them for a list of prompts. Ctrl-C ends the generation, not the
        program: what was made so far is returned, with the finish_reason "interrupted".

    Raises:
        ValueError, TypeError: an argument of the wrong type or range; logits without a next word.

    >>> from types import SimpleNamespace
    >>> from lmhead import LMHead
    >>> from lmhead.nn import LlamaBody, LlamaConfig
    >>> import torch
    >>> _ = torch.manual_seed(0)
    >>> body = LlamaBody(LlamaConfig(50, 16, 24, 2, 4, 2))
    >>> model = SimpleNamespace(
    ...     body=body, head=LMHead.tied(body.embedding), eos_token_ids=(), tokenizer=None
    ... )
    >>> made = generate(model, [3, 1, 4], max_new_tokens=5, logprobs=2)
    >>> len(made.tokens), made.finish_reason, len(made.events[0].top)
    (5, 'length', 2)
    """
    task = Task(model, prompt, sampler, max_new_tokens, stop, logprobs, eos_token_ids)
    # Only whole events are kept, so that an interruption at any point leaves no half of one.
    made: list[list[TokenEvent]] = [[] for _ in task.prompts]
    interrupted = False
    try:
        for event in task.run():
            made[event.row].append(event)
            if stream is not None:
                stream(event)
    except KeyboardInterrupt:
        interrupted = True
    rows = [task.result(row, events, interrupted) for row, events in enumerate(made)]
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
) -> Iterator[TokenEvent]:
    """`generate` as an iterator: one `TokenEvent` for each token of each row, as it comes.

    Equivalent to: [event for step in steps for event in rows of that step]

    Arguments are those of `generate`, and are checked before the first token is asked for. Nothing
    is computed ahead: leave the loop, or call `.close()`, and no more is done.

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
    return Task(model, prompt, sampler, max_new_tokens, stop, logprobs, eos_token_ids).run()
