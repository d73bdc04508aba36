"""`Sampler`: from logits to a token, through a chain of stages.

In:  logits (..., V), a tensor or a `LazyLogits`; the ids so far; a position.
Out: `Sampled`. A row's token depends on its logits, its context, its seed and its position only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from lmhead.logits import LazyLogits
from lmhead.sampling.chain import check_chain
from lmhead.sampling.context import Context
from lmhead.sampling.dialects import ORDERS, TIES, stages_of
from lmhead.sampling.distribution import Distribution, Few
from lmhead.sampling.explain import SHOWN, Explanation, explain
from lmhead.sampling.mirostat import Mirostat2
from lmhead.sampling.noise import make_keys
from lmhead.sampling.options import Options
from lmhead.sampling.run import active, run, start
from lmhead.sampling.sampled import Sampled
from lmhead.sampling.stage import Call, Stage, per_row

Ids = Tensor | Sequence[Sequence[int]]
PerRowInt = int | Sequence[int] | Tensor


class Sampler:
    """Chooses the next token.

    Options are those of `lmhead.sampling.Options`, named as in Hugging Face's `GenerationConfig`
    and vLLM's `SamplingParams`: `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`,
    `repetition_penalty`, `logit_bias` and so on. Numbers may be lists, one per row.

    Args:
        order: whose sequence of stages: "hf", "vllm" or "llama.cpp".
        seed: a whole number, or one per row. The same seed, position and logits give the same
            token, in any batch. None takes a new one for every row and call, from torch's
            generator.
        ties: of words that tie for the last place of top_k, "lowest" keeps the lowest ids, "keep"
            keeps all, as Hugging Face and vLLM do.
        stages: a list of stages in your own order, instead of options.

    >>> logits = torch.tensor([[3.0, 2.0, 1.0]])
    >>> sampler = Sampler(temperature=0.5, top_p=0.8, seed=0)
    >>> sampler(logits).kept[0]
    tensor([0])
    >>> Sampler(temperature=0.5, top_p=0.8, order="llama.cpp", seed=0)(logits).kept[0]
    tensor([0, 1])
    """

    def __init__(
        self,
        *,
        stages: Sequence[Stage] | None = None,
        order: str = "hf",
        seed: int | Sequence[int] | Tensor | None = None,
        ties: str = "lowest",
        **options: Any,
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")
        if ties not in TIES:
            raise ValueError(f"ties must be one of {', '.join(TIES)}; got {ties!r}")
        if stages is not None and set(options) - {"temperature", "do_sample"}:
            raise TypeError("give stages or options, not both")
        self.options = Options.of(options)
        self.order, self.ties = order, ties
        self.seed = _check_seed(seed)
        self.stages = stages_of(self.options, order, ties) if stages is None else list(stages)
        check_chain(self.stages, self.options)

    @property
    def is_greedy(self) -> bool:
        """Whether the best word is taken in every row."""
        hot = torch.as_tensor(self.options.temperature, dtype=torch.float64) > 0
        return not self.options.do_sample or not bool(hot.any())

    def select(self, rows: Tensor) -> Sampler:
        """The sampler of some rows of a batch, where options or seeds are given one per row."""
        chosen: dict[str, Any] = {}
        for f in fields(Options):
            value = getattr(self.options, f.name)
            if "PerRow" in str(f.type) and isinstance(value, list | tuple | Tensor):
                chosen[f.name] = torch.as_tensor(value)[rows].tolist()
        other = copy(self)
        if isinstance(self.seed, list):
            other.seed = [self.seed[i] for i in rows.tolist()]
        if chosen:
            other.options = replace(self.options, **chosen)
            other.stages = stages_of(other.options, self.order, self.ties)
        return other

    def __repr__(self) -> str:
        given = [
            f"{f.name}={getattr(self.options, f.name)!r}"
            for f in fields(Options)
            if getattr(self.options, f.name) is not f.default
        ]
        return f"Sampler({', '.join([*given, f'order={self.order!r}', f'seed={self.seed!r}'])})"

    def __call__(
        self,
        logits: Tensor | LazyLogits,
        context: Ids | None = None,
        position: PerRowInt | None = None,
        *,
        prompt_length: PerRowInt | None = None,
        context_mask: Tensor | None = None,
        unconditional: Tensor | LazyLogits | None = None,
        state: Tensor | None = None,
    ) -> Sampled:
        """Choose a token for each row of logits.

        Args:
            logits: (..., V).
            context: the ids so far, prompt and output: (B, L), or a list of lists.
            position: of the token to come, one or one per row: the noise depends on it. The
                number of context ids if not given.
            prompt_length: how many of the context ids are the prompt; all if not given.
            context_mask: (B, L), False for padding.
            unconditional: (..., V), logits without the prompt, for `guidance_scale`.
            state: `Sampled.state` of the call before.

        Raises:
            ValueError: NaN or inf among the logits, a row where every word is masked (naming the
                stage that did it), ids out of range.
        """
        call = self.call(
            logits, context, position, prompt_length, context_mask, unconditional, state
        )
        lead, given = logits.shape[:-1], _rows(logits)
        sampled = run(given, self.stages, call, self.greedy_rows(call))
        return replace(
            sampled,
            token=sampled.token.reshape(lead),
            log_prob=sampled.log_prob.reshape(lead),
            raw_log_prob=sampled.raw_log_prob.reshape(lead),
            log_kept_mass=sampled.log_kept_mass.reshape(lead),
        )

    def process(
        self,
        scores: Tensor,
        context: Ids | None = None,
        position: PerRowInt | None = None,
        *,
        prompt_length: PerRowInt | None = None,
        context_mask: Tensor | None = None,
        unconditional: Tensor | None = None,
        state: Tensor | None = None,
    ) -> Tensor:
        """What the stages make of scores (..., V): words that were cut are -inf.

        >>> Sampler(top_k=2).process(torch.tensor([[3.0, 2.0, 1.0]]))
        tensor([[3., 2., -inf]])
        """
        call = self.call(
            scores, context, position, prompt_length, context_mask, unconditional, state
        )
        z = _tensor_rows(scores)
        out = torch.empty_like(z)
        for which, cold, part in self._kinds(call):
            words: Distribution = start(z[which], part.rows)
            for stage in active(self.stages, greedy=cold):
                words = stage(words, part)
            whole = words.widen(call.vocab) if isinstance(words, Few) else words
            out[which] = whole.applied().to(z.dtype)
        return out.to(scores.dtype).reshape(scores.shape)

    def explain(
        self,
        logits: Tensor | LazyLogits,
        context: Ids | None = None,
        position: PerRowInt | None = None,
        *,
        prompt_length: PerRowInt | None = None,
        context_mask: Tensor | None = None,
        unconditional: Tensor | LazyLogits | None = None,
        state: Tensor | None = None,
        shown: int = SHOWN,
    ) -> Explanation:
        """What each stage does to these logits: words and mass left, words cut, entropy.

        Prints as a table; `.to_json()` and `.steps` for programs, which list the `shown` most
        probable of the words that a stage cut.
        """
        call = self.call(
            logits, context, position, prompt_length, context_mask, unconditional, state
        )
        z = _dense_rows(logits)
        parts = []
        for which, cold, part in self._kinds(call):
            stages = active(self.stages, greedy=cold)
            rows = start(z[which], part.rows)
            parts.append(explain(rows, stages, part, greedy=cold, shown=shown))
        return Explanation.join(parts)

    def _kinds(self, call: Call) -> Iterator[tuple[Tensor, bool, Call]]:
        """The rows that take the best word, and those that are drawn: numbers, which, the call."""
        greedy = self.greedy_rows(call)
        for cold in (True, False):
            which = (greedy == cold).nonzero()[:, 0]
            if len(which):
                yield which, cold, call.select(which)

    def greedy_rows(self, call: Call) -> Tensor:
        """Which rows take the best word, (B,)."""
        if not self.options.do_sample:
            return torch.ones(call.batch, dtype=torch.bool)
        if isinstance(self.options.temperature, int | float) and self.options.temperature > 0:
            return torch.zeros(call.batch, dtype=torch.bool)
        return per_row("temperature", self.options.temperature, call) == 0

    def call(
        self,
        logits: Tensor | LazyLogits,
        context: Ids | None,
        position: PerRowInt | None,
        prompt_length: PerRowInt | None,
        context_mask: Tensor | None,
        unconditional: Tensor | LazyLogits | None,
        state: Tensor | None,
    ) -> Call:
        """Check what a caller gives, and put it together."""
        if not isinstance(logits, Tensor | LazyLogits):
            raise TypeError(
                f"logits must be a torch.Tensor or LazyLogits; got {type(logits).__name__}"
            )
        if logits.dim() == 0 or not logits.is_floating_point() or logits.shape[-1] == 0:
            raise ValueError(
                f"logits must be floating, of shape (..., V) with V > 0; got {logits.dtype}, "
                f"shape {tuple(logits.shape)}"
            )
        vocab = logits.shape[-1]
        n = math.prod(logits.shape[:-1])
        said = Context.of(context, n, vocab, prompt_length=prompt_length, mask=context_mask)
        positions = torch.tensor(said.lengths, dtype=torch.int64)
        if position is not None:
            positions = torch.as_tensor(position).reshape(-1).long()
            if len(positions) not in (1, n):
                raise ValueError(
                    f"position must be a number or one per row, {n}; got {len(positions)} of them"
                )
            positions = positions.expand(n)
        other = None
        if unconditional is not None:
            if unconditional.shape != logits.shape:
                raise ValueError(
                    f"unconditional must have the shape of logits, {tuple(logits.shape)}; "
                    f"got {tuple(unconditional.shape)}"
                )
            other = _dense_rows(unconditional)
        keys = make_keys(self._seeds(n), positions)
        call = Call(keys, torch.arange(n), n, vocab, said, other)
        mirostat = next((s for s in self.stages if isinstance(s, Mirostat2)), None)
        if mirostat is None:
            return call
        if state is not None and state.shape != (n,):
            raise ValueError(f"state must have one entry per row, {n}; got {tuple(state.shape)}")
        return replace(call, surprise=mirostat.start(call) if state is None else state)

    def _seeds(self, n: int) -> list[int]:
        if self.seed is None:
            drawn: list[int] = torch.randint(-(2**63), 2**63 - 1, (n,)).tolist()
            return drawn
        if isinstance(self.seed, int):
            return [self.seed] * n
        if len(self.seed) != n:
            raise ValueError(
                f"seed must be a number or one per row, {n}; got {len(self.seed)} of them"
            )
        return self.seed


def _rows(logits: Tensor | LazyLogits) -> Any:
    """(B, V) as a tensor, or as rows that are not built."""
    if isinstance(logits, Tensor):
        return _tensor_rows(logits)
    return logits.detach().reshape(-1, logits.shape[-1]).rows()


def _tensor_rows(logits: Tensor) -> Tensor:
    """(B, V), contiguous, in float32 or float64."""
    z = logits.detach().reshape(-1, logits.shape[-1])
    return (z if z.dtype == torch.float64 else z.float()).contiguous()


def _dense_rows(logits: Tensor | LazyLogits) -> Tensor:
    """(B, V), made one by one where they are lazy."""
    if isinstance(logits, Tensor):
        return _tensor_rows(logits)
    rows = _rows(logits)
    made = [rows.whole(i) for i in range(len(rows))]
    return torch.stack(made) if made else torch.empty(0, logits.shape[-1])


def _check_seed(seed: Any) -> int | list[int] | None:
    given = seed.tolist() if isinstance(seed, Tensor) else seed
    if given is None or type(given) is int:
        return given
    if isinstance(given, list | tuple) and all(type(s) is int for s in given):
        return list(given)
    raise TypeError(f"seed must be a whole number, or one per row; got {seed!r}")


def _signature() -> inspect.Signature:
    """The options as keyword arguments, for `help` and editors."""
    own = list(inspect.signature(Sampler.__init__).parameters.values())[1:-1]
    theirs = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default)
        for f in fields(Options)
    ]
    return inspect.Signature([*theirs, *own])


Sampler.__signature__ = _signature()  # type: ignore[attr-defined]
