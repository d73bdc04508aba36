"""The order of the stages in Hugging Face, vLLM and llama.cpp.

The same options mean different things in different programs: with logits [3, 2, 1], top_p 0.8 and
temperature 0.5, Hugging Face divides first and keeps one token; llama.cpp cuts first and keeps two.
An order defines the sequence of the stages and which ids the penalties count. A stage that a
program does not have is placed next to the most similar one.

Differences from llama.cpp: with mirostat it drops penalties, DRY and the dynamic temperature,
which work here, and all cuts, which raise an error here. After top_n_sigma it still counts tokens
that were removed (dynamic temperature, XTC, min_keep), and typical_p yields NaN for them; here
they are removed. Temperature 0 with a dynatemp_range raises an error here, and samples there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, get_args

import torch

from lmhead.sampler_options import Options, as_ids
from lmhead.sampling.constraint_stages import (
    AllowedIds,
    BadWords,
    ForcedTokens,
    Guidance,
    LogitBias,
    MinLength,
    SequenceBias,
    Suppress,
)
from lmhead.sampling.mirostat_stage import Mirostat1, Mirostat2
from lmhead.sampling.penalty_stages import (
    DRY,
    Counted,
    CountPenalty,
    NoRepeatNGram,
    RepetitionPenalty,
)
from lmhead.sampling.stage import DynamicTemperature, PerRow, Stage, Temperature, any_row
from lmhead.sampling.truncation_stages import (
    XTC,
    Epsilon,
    Eta,
    MinP,
    TopH,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)

Ties = Literal["lowest", "keep"]
TIES: tuple[str, ...] = get_args(Ties)

_SEQUENCES: dict[str, str] = {
    "hf": """guidance sequence_bias logit_bias repetition counts dry no_repeat bad_words min_length
        min_new allowed forced_bos forced_eos forced suppress begin_suppress
        temperature top_n_sigma top_h top_k top_p min_p typical epsilon eta xtc mirostat""",
    "vllm": """guidance allowed bad_words min_length min_new logit_bias sequence_bias repetition
        counts dry no_repeat forced_bos forced_eos forced suppress begin_suppress
        temperature min_p top_n_sigma top_h top_k top_p typical epsilon eta xtc mirostat""",
    "llama.cpp": """guidance logit_bias sequence_bias bad_words min_length min_new allowed
        forced_bos forced_eos forced suppress begin_suppress repetition counts dry no_repeat
        top_n_sigma top_k top_h typical top_p min_p epsilon eta xtc temperature mirostat""",
}
# Default of penalty_last_n by program; all ids otherwise.
_LAST_N = {"llama.cpp": 64}
# Which ids frequency and presence penalties count.
_COUNTED: dict[str, Counted] = {"hf": "output", "vllm": "output", "llama.cpp": "context"}
# Minimum of top_k by program, where it is not min_tokens_to_keep.
_MIN_K = {"llama.cpp": 1}


def stages_of(options: Options, order: str, ties: str) -> list[Stage]:
    """Return the stages that the options enable, in the order of a program."""
    makers = _Makers(options, order, ties)
    stages: list[Stage] = []
    for name in _SEQUENCES[order].split():
        make: Callable[[], Iterator[Stage]] = getattr(makers, name)
        stages.extend(make())
    return stages


class _Makers:
    """One method per stage; it yields the stage if the options enable it."""

    def __init__(self, options: Options, order: str, ties: str) -> None:
        self.o, self.order, self.ties = options, order, ties

    def guidance(self) -> Iterator[Stage]:
        if self.o.guidance_scale is not None and any_row(self.o.guidance_scale, 1):
            yield Guidance(self.o.guidance_scale)

    def sequence_bias(self) -> Iterator[Stage]:
        if self.o.sequence_bias is not None:
            yield SequenceBias(self.o.sequence_bias)

    def logit_bias(self) -> Iterator[Stage]:
        if self.o.logit_bias:
            yield LogitBias(self.o.logit_bias)

    def _last_n(self, given: int | None) -> int | None:
        last_n = _LAST_N.get(self.order) if given is None else given
        return None if last_n == -1 else last_n

    def repetition(self) -> Iterator[Stage]:
        if self.o.repetition_penalty is not None and any_row(self.o.repetition_penalty, 1):
            last_n = self._last_n(self.o.penalty_last_n)
            yield RepetitionPenalty(self.o.repetition_penalty, last_n=last_n)

    def counts(self) -> Iterator[Stage]:
        frequency, presence = self.o.frequency_penalty, self.o.presence_penalty
        if any_row(frequency, 0) or any_row(presence, 0):
            last_n = self._last_n(self.o.penalty_last_n)
            yield CountPenalty(frequency, presence, counted=_COUNTED[self.order], last_n=last_n)

    def dry(self) -> Iterator[Stage]:
        o = self.o
        if any_row(o.dry_multiplier, 0):
            last_n = None if o.dry_penalty_last_n == -1 else o.dry_penalty_last_n
            yield DRY(
                o.dry_multiplier,
                o.dry_base,
                o.dry_allowed_length,
                last_n=last_n,
                breakers=o.dry_sequence_breakers,
            )

    def no_repeat(self) -> Iterator[Stage]:
        if self.o.no_repeat_ngram_size:
            yield NoRepeatNGram(self.o.no_repeat_ngram_size)

    def bad_words(self) -> Iterator[Stage]:
        if self.o.bad_words_ids is not None:
            # Hugging Face alone lets a text end even if its end is a bad token.
            yield BadWords(self.o.bad_words_ids, self.o.ends if self.order == "hf" else ())

    def min_length(self) -> Iterator[Stage]:
        if self.o.min_length:
            yield MinLength(self.o.min_length, self.o.ends)

    def min_new(self) -> Iterator[Stage]:
        if self.o.min_new_tokens:
            yield MinLength(self.o.min_new_tokens, self.o.ends, new=True)

    def allowed(self) -> Iterator[Stage]:
        if self.o.allowed_token_ids is not None:
            yield AllowedIds(self.o.allowed_token_ids)

    def forced_bos(self) -> Iterator[Stage]:
        if self.o.forced_bos_token_id is not None:
            yield ForcedTokens({1: [self.o.forced_bos_token_id]}, name="forced_bos_token_id")

    def forced_eos(self) -> Iterator[Stage]:
        if self.o.forced_eos_token_id is not None and self.o.max_length is not None:
            ids = as_ids(self.o.forced_eos_token_id)
            yield ForcedTokens({self.o.max_length - 1: ids}, name="forced_eos_token_id")

    def forced(self) -> Iterator[Stage]:
        if self.o.forced_tokens:
            yield ForcedTokens(
                {position: as_ids(ids) for position, ids in self.o.forced_tokens.items()}
            )

    def suppress(self) -> Iterator[Stage]:
        if self.o.suppress_tokens:
            yield Suppress(self.o.suppress_tokens)

    def begin_suppress(self) -> Iterator[Stage]:
        if self.o.begin_suppress_tokens:
            forced = self.o.forced_bos_token_id is not None
            yield Suppress(self.o.begin_suppress_tokens, at_begin=True, forced_first=forced)

    def temperature(self) -> Iterator[Stage]:
        o = self.o
        if any_row(o.dynatemp_range, 0):
            yield DynamicTemperature(o.temperature, o.dynatemp_range, o.dynatemp_exponent)
        elif any_row(o.temperature, 1) or not o.do_sample:
            yield Temperature(o.temperature)

    def top_n_sigma(self) -> Iterator[Stage]:
        if self.o.top_n_sigma is not None:
            yield TopNSigma(self.o.top_n_sigma)

    def top_h(self) -> Iterator[Stage]:
        if self.o.top_h is not None:
            yield TopH(self.o.top_h)

    def top_k(self) -> Iterator[Stage]:
        if self.o.top_k is not None and (any_row(self.o.top_k, 0) and any_row(self.o.top_k, -1)):
            least = _MIN_K.get(self.order, self.o.min_tokens_to_keep)
            yield TopK(_at_least(self.o.top_k, least), ties=self.ties)

    def top_p(self) -> Iterator[Stage]:
        if self.o.top_p is not None and any_row(self.o.top_p, 1):
            yield TopP(self.o.top_p, min_tokens_to_keep=self.o.min_tokens_to_keep)

    def min_p(self) -> Iterator[Stage]:
        if self.o.min_p is not None and any_row(self.o.min_p, 0):
            yield MinP(self.o.min_p, min_tokens_to_keep=self.o.min_tokens_to_keep)

    def typical(self) -> Iterator[Stage]:
        if self.o.typical_p is not None and any_row(self.o.typical_p, 1):
            yield Typical(self.o.typical_p, min_tokens_to_keep=self.o.min_tokens_to_keep)

    def epsilon(self) -> Iterator[Stage]:
        if self.o.epsilon_cutoff is not None and any_row(self.o.epsilon_cutoff, 0):
            yield Epsilon(self.o.epsilon_cutoff, min_tokens_to_keep=self.o.min_tokens_to_keep)

    def eta(self) -> Iterator[Stage]:
        if self.o.eta_cutoff is not None and any_row(self.o.eta_cutoff, 0):
            yield Eta(self.o.eta_cutoff, min_tokens_to_keep=self.o.min_tokens_to_keep)

    def xtc(self) -> Iterator[Stage]:
        o = self.o
        if any_row(o.xtc_probability, 0):
            keep = o.min_tokens_to_keep
            yield XTC(o.xtc_probability, o.xtc_threshold, min_tokens_to_keep=keep)

    def mirostat(self) -> Iterator[Stage]:
        if self.o.mirostat:
            version = Mirostat1 if self.o.mirostat == 1 else Mirostat2
            yield version(self.o.mirostat_tau, self.o.mirostat_eta)


def _at_least(k: PerRow, least: int) -> list[float] | float:
    """Raise top_k to min_tokens_to_keep; 0 and -1 still mean all tokens."""
    values = torch.as_tensor(k, dtype=torch.float64)
    raised: list[float] | float = torch.where(values > 0, values.clamp(min=least), values).tolist()
    return raised
