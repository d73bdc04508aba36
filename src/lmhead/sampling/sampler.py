"""`Sampler`: from logits to a token, through a chain of stages.

In:  logits (..., V), a tensor or a `LazyLogits`; the ids so far; a position.
Out: `Sampled`. A row's token depends on its logits, its context, its seed and its position only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import Field, fields, replace
from typing import Any

import torch
from torch import Tensor

from lmhead.lazy import LazyLogits
from lmhead.lazy.bitmask import allowed_tokens, padded_bitmask
from lmhead.sampler_options import ORDERS, Options
from lmhead.sampling.chain import check_chain
from lmhead.sampling.distribution import Distribution, check_seed, position_tensor, row_keys
from lmhead.sampling.explain import SHOWN, Explanation, explain
from lmhead.sampling.mirostat_stage import Mirostat2
from lmhead.sampling.run_stages import Sampled, ScreenedSampled, active, run_stages, start
from lmhead.sampling.screened_batch import sample_rows
from lmhead.sampling.stage import Call, Context, Stage, per_row
from lmhead.sampling.stage_order import TIES, stages_of
from lmhead.scores import Scores
from lmhead.screen import ScreenedHead, ScreenedSample
from lmhead.screen.screened_scores import ScreenedScores
from lmhead.sweep import Source, SweptScores

Ids = Tensor | Sequence[Sequence[int]]
PerRowInt = int | Sequence[int] | Tensor


class Sampler:
    """Choose the next token from logits, by a chain of stages.

    Options are those of `lmhead.sampling.Options`, named as in Hugging Face's `GenerationConfig`
    and vLLM's `SamplingParams`: `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`,
    `repetition_penalty`, `logit_bias` and so on. Numbers may be lists, one per row.

    Args:
        order: the program whose order of stages to use: "hf", "vllm" or "llama.cpp".
        seed: an integer, or one per row. The same seed, position and logits give the same
            token, in any batch. None draws a new one for every row and call, from torch's
            generator.
        ties: of tokens that tie for the last place of top_k, "lowest" keeps the lowest ids, "keep"
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
        self.seed = check_seed(seed)
        self._own_stages = stages is not None
        self.stages = stages_of(self.options, order, ties) if stages is None else list(stages)
        check_chain(self.stages, self.options)

    @property
    def is_greedy(self) -> bool:
        """True if every row takes the best token."""
        samples = torch.as_tensor(self.options.temperature, dtype=torch.float64) > 0
        return not self.options.do_sample or not bool(samples.any())

    def select(self, rows: Tensor) -> Sampler:
        """Return the sampler of some rows of a batch: their options and seeds."""
        chosen: dict[str, Any] = {}
        for f in fields(Options):
            value = getattr(self.options, f.name)
            if _is_per_row(f) and isinstance(value, list | tuple | Tensor):
                chosen[f.name] = torch.as_tensor(value)[rows].tolist()
        other = copy(self)
        if isinstance(self.seed, list):
            other.seed = [self.seed[i] for i in rows.tolist()]
        if chosen:
            other.options = replace(self.options, **chosen)
            other.stages = stages_of(other.options, self.order, self.ties)
        return other

    @property
    def merge_key(self) -> Any:
        """What samplers must have in common to be merged: all but seeds and numbers per row."""
        if self._own_stages or any(isinstance(s, Mirostat2) for s in self.stages):
            return id(self)
        parts = [
            (getattr(self.options, f.name) is None) if _is_per_row(f) else repr(value)
            for f in fields(Options)
            for value in [getattr(self.options, f.name)]
        ]
        return (self.order, self.ties, self.seed is None, *parts)

    @staticmethod
    def merge(samplers: Sequence[Sampler]) -> Sampler:
        """Return one sampler for the rows of several, which have one row and one `merge_key` each.

        Equivalent to: each sampler on its own row of the logits.
        """
        first = samplers[0]
        if len(samplers) == 1:
            return first
        changed: dict[str, Any] = {}
        for f in fields(Options):
            values = [getattr(sampler.options, f.name) for sampler in samplers]
            if _is_per_row(f) and values[0] is not None:
                rows = [torch.as_tensor(value).reshape(-1).tolist()[0] for value in values]
                changed[f.name] = rows if len(set(rows)) > 1 else rows[0]
        other = copy(first)
        other.options = replace(first.options, **changed)
        other.stages = stages_of(other.options, first.order, first.ties)
        if first.seed is not None:
            other.seed = [s.seed[0] if isinstance(s.seed, list) else s.seed for s in samplers]  # type: ignore[misc]
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
        allowed: Tensor | None = None,
    ) -> Sampled:
        """Choose a token for each row of logits.

        Args:
            logits: (..., V).
            context: the ids so far, prompt and output: (B, L), or a list of lists.
            position: of the next token, one or one per row: the noise depends on it. The
                number of context ids if not given.
            prompt_length: how many of the context ids are the prompt; all if not given.
            context_mask: (B, L), False for padding.
            unconditional: (..., V), logits without the prompt, for `guidance_scale`.
            state: `Sampled.state` of the previous call.
            allowed: (B, W) int32, a bit per token as in `LazyLogits.mask_tokens`: the others have
                no probability. A screened head does not read tokens that no row allows.

        Raises:
            ValueError: NaN or inf among the logits, a row where every token is masked (naming the
                stage), ids out of range.
        """
        shape = _shape(logits)
        call = self.call(
            shape, context, position, prompt_length, context_mask, unconditional, state
        )
        lead, all_rows = shape[:-1], _rows(logits)
        screened = all_rows if isinstance(all_rows, ScreenedScores) else None
        greedy = self.greedy_rows(call)

        def exact(rows: Tensor | None = None) -> Sampled:
            """Sample from all logits: all rows in their shape, or some rows."""
            permitted = all_rows if allowed is None else _rows(masked(logits, allowed))
            if rows is not None:
                selected = (
                    permitted.select(rows) if isinstance(permitted, Scores) else permitted[rows]
                )
                return run_stages(selected, self.stages, call.select(rows), greedy[rows])
            sampled = run_stages(permitted, self.stages, call, greedy)
            return replace(
                sampled,
                token=sampled.token.reshape(lead),
                log_prob=sampled.log_prob.reshape(lead),
                raw_log_prob=sampled.raw_log_prob.reshape(lead),
                log_kept_mass=sampled.log_kept_mass.reshape(lead),
            )

        if (
            screened is None
            or not screened.reads_copy
            or call.surprise is not None
            or call.unconditional is not None
        ):
            return exact()
        head: Any = screened.screen
        source = head.compatible_source(screened.source)
        if source is None:
            return exact()
        bits = None if allowed is None else padded_bitmask(allowed, shape)
        sample = sample_rows(head, source, self.stages, call, greedy, exact, allowed=bits)
        sample = sample.reshape(lead)
        return ScreenedSampled(sample.token, (sample.log_prob, sample.raw_log_prob), exact)

    def sample_screened(
        self,
        screened: ScreenedHead,
        source: Source,
        lead: torch.Size,
        context: Ids | None = None,
        position: PerRowInt | None = None,
        *,
        prompt_length: PerRowInt | None = None,
        context_mask: Tensor | None = None,
        exact: bool = False,
    ) -> ScreenedSample:
        """Choose a token for each row of a screened head, (*lead); see `ScreenedHead.sample`."""
        shape = torch.Size([*lead, source.vocab])
        call = self.call(shape, context, position, prompt_length, context_mask, None, None)
        if call.surprise is not None:
            raise ValueError("mirostat needs its state: call the sampler on head(hidden) instead")
        greedy = self.greedy_rows(call)
        scores = SweptScores(source)

        def dense(rows: Tensor) -> Sampled:
            return run_stages(scores.select(rows), self.stages, call.select(rows), greedy[rows])

        sample = sample_rows(screened, source, self.stages, call, greedy, dense, exact=exact)
        return sample.reshape(lead)

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
        """Return the scores (..., V) after all stages; removed tokens are -inf.

        >>> Sampler(top_k=2).process(torch.tensor([[3.0, 2.0, 1.0]]))
        tensor([[3., 2., -inf]])
        """
        call = self.call(
            _shape(scores), context, position, prompt_length, context_mask, unconditional, state
        )
        z = _tensor_rows(scores)
        out = torch.empty_like(z)
        for rows, greedy, part in self._greedy_and_sampled(call):
            distribution: Distribution = start(z[rows], part.rows)
            for stage in active(self.stages, greedy=greedy):
                distribution = stage(distribution, part)
            out[rows] = distribution.to_full(call.vocab).scaled_logits().to(z.dtype)
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
        """Return what each stage does to these logits: tokens and mass kept, tokens cut, entropy.

        Prints as a table; `.to_json()` and `.steps` for programs, which list the `shown` most
        probable of the tokens that a stage cut.
        """
        shape = _shape(logits)
        call = self.call(
            shape, context, position, prompt_length, context_mask, unconditional, state
        )
        z = _dense_rows(logits)
        parts = []
        for rows, greedy, part in self._greedy_and_sampled(call):
            stages = active(self.stages, greedy=greedy)
            distribution = start(z[rows], part.rows)
            parts.append(explain(distribution, stages, part, greedy=greedy, shown=shown))
        return Explanation.join(parts)

    def _greedy_and_sampled(self, call: Call) -> Iterator[tuple[Tensor, bool, Call]]:
        """Yield indices, whether greedy, and call of the greedy rows, then of the sampled ones."""
        greedy = self.greedy_rows(call)
        for take_best in (True, False):
            rows = (greedy == take_best).nonzero()[:, 0]
            if len(rows):
                yield rows, take_best, call.select(rows)

    def greedy_rows(self, call: Call) -> Tensor:
        """Return which rows take the best token, (B,)."""
        if not self.options.do_sample:
            return torch.ones(call.batch, dtype=torch.bool)
        if isinstance(self.options.temperature, int | float) and self.options.temperature > 0:
            return torch.zeros(call.batch, dtype=torch.bool)
        return per_row("temperature", self.options.temperature, call) == 0

    def call(
        self,
        shape: torch.Size,
        context: Ids | None,
        position: PerRowInt | None,
        prompt_length: PerRowInt | None,
        context_mask: Tensor | None,
        unconditional: Tensor | LazyLogits | None,
        state: Tensor | None,
    ) -> Call:
        """Validate the arguments of a call on logits of this shape, (..., V)."""
        vocab, n = shape[-1], math.prod(shape[:-1])
        tokens = Context.of(context, n, vocab, prompt_length=prompt_length, mask=context_mask)
        positions = position_tensor(tokens.lengths if position is None else position)
        unconditional_rows = None
        if unconditional is not None:
            if unconditional.shape != shape:
                raise ValueError(
                    f"unconditional must have the shape of logits, {tuple(shape)}; "
                    f"got {tuple(unconditional.shape)}"
                )
            unconditional_rows = _dense_rows(unconditional)
        # Greedy decoding draws nothing, and no seed either.
        seed = self.seed if self.options.do_sample else self.seed or 0
        call = Call(
            row_keys(seed, positions, n), torch.arange(n), n, vocab, tokens, unconditional_rows
        )
        mirostat = next((s for s in self.stages if isinstance(s, Mirostat2)), None)
        if mirostat is None:
            return call
        if state is not None and state.shape != (n,):
            raise ValueError(f"state must have one entry per row, {n}; got {tuple(state.shape)}")
        return replace(call, surprise=mirostat.start(call) if state is None else state)


def _shape(logits: Tensor | LazyLogits) -> torch.Size:
    """Validate logits, and return their shape (..., V)."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a torch.Tensor or LazyLogits; got {type(logits).__name__}")
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype = logits.shape, logits.dtype
    if len(shape) == 0 or not dtype.is_floating_point or shape[-1] == 0:
        raise ValueError(
            f"logits must be floating, of shape (..., V) with V > 0; got {dtype}, "
            f"shape {tuple(shape)}"
        )
    return shape


def _is_per_row(option: Field[Any]) -> bool:
    return "PerRow" in str(option.type)


def masked(logits: Tensor | LazyLogits, allowed: Tensor) -> Tensor | LazyLogits:
    """Return the logits with -inf where a bit of `allowed` (B, W) is 0."""
    if isinstance(logits, LazyLogits):
        return logits.mask_tokens(allowed)
    return logits.masked_fill(~allowed_tokens(allowed, logits.shape[-1]), -math.inf)


def _rows(logits: Tensor | LazyLogits) -> Tensor | Scores:
    """Return (B, V) as a tensor, or as scores that are not built."""
    return logits.scores() if isinstance(logits, LazyLogits) else _tensor_rows(logits)


def _tensor_rows(logits: Tensor) -> Tensor:
    """Return (B, V), contiguous, in float32 or float64."""
    z = logits.detach().reshape(-1, logits.shape[-1])
    return (z if z.dtype == torch.float64 else z.float()).contiguous()


def _dense_rows(logits: Tensor | LazyLogits) -> Tensor:
    """Return (B, V); rows of lazy logits are computed independently of each other."""
    all_rows = _rows(logits)
    return all_rows if isinstance(all_rows, Tensor) else all_rows.row_logits()


def _signature() -> inspect.Signature:
    """Return the options as keyword arguments, for `help` and editors."""
    parameters = list(inspect.signature(Sampler.__init__).parameters.values())[1:-1]
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default)
        for f in fields(Options)
    ]
    return inspect.Signature([*options, *parameters])


Sampler.__signature__ = _signature()  # type: ignore[attr-defined]
