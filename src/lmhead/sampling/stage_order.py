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

from collections.abc import Iterator
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
    "hf": """guidance_scale sequence_bias logit_bias repetition_penalty frequency_penalty
        dry_multiplier no_repeat_ngram_size bad_words_ids min_length min_new_tokens
        allowed_token_ids forced_bos_token_id forced_eos_token_id forced_tokens suppress_tokens
        begin_suppress_tokens temperature dynatemp_range top_n_sigma top_h top_k top_p min_p
        typical_p epsilon_cutoff eta_cutoff xtc_probability mirostat""",
    "vllm": """guidance_scale allowed_token_ids bad_words_ids min_length min_new_tokens logit_bias
        sequence_bias repetition_penalty frequency_penalty dry_multiplier no_repeat_ngram_size
        forced_bos_token_id forced_eos_token_id forced_tokens suppress_tokens begin_suppress_tokens
        temperature dynatemp_range min_p top_n_sigma top_h top_k top_p typical_p epsilon_cutoff
        eta_cutoff xtc_probability mirostat""",
    "llama.cpp": """guidance_scale logit_bias sequence_bias bad_words_ids min_length min_new_tokens
        allowed_token_ids forced_bos_token_id forced_eos_token_id forced_tokens suppress_tokens
        begin_suppress_tokens repetition_penalty frequency_penalty dry_multiplier
        no_repeat_ngram_size top_n_sigma top_k top_h typical_p top_p min_p epsilon_cutoff eta_cutoff
        xtc_probability temperature dynatemp_range mirostat""",
}
# Default of penalty_last_n by program; all ids otherwise.
_LAST_N = {"llama.cpp": 64}
# Which ids frequency and presence penalties count.
_COUNTED: dict[str, Counted] = {"hf": "output", "vllm": "output", "llama.cpp": "context"}
# Minimum of top_k by program, where it is not min_tokens_to_keep.
_MIN_K = {"llama.cpp": 1}


def stages_of(options: Options, order: str, ties: str) -> list[Stage]:
    """Return the stages that the options enable, in the order of a program."""
    sequence = _SEQUENCES[order].split()
    return sorted(_enabled(options, order, ties), key=lambda stage: sequence.index(stage.name))


def _enabled(o: Options, order: str, ties: str) -> Iterator[Stage]:
    """Yield the stages that the options enable, in any order."""
    if any_row(o.guidance_scale, 1):
        yield Guidance(o.guidance_scale)
    if o.sequence_bias is not None:
        yield SequenceBias(o.sequence_bias)
    if o.logit_bias:
        yield LogitBias(o.logit_bias)
    last_n = _LAST_N.get(order) if o.penalty_last_n is None else _last(o.penalty_last_n)
    if any_row(o.repetition_penalty, 1):
        yield RepetitionPenalty(o.repetition_penalty, last_n=last_n)
    if any_row(o.frequency_penalty, 0) or any_row(o.presence_penalty, 0):
        penalties = o.frequency_penalty, o.presence_penalty
        yield CountPenalty(*penalties, counted=_COUNTED[order], last_n=last_n)
    if any_row(o.dry_multiplier, 0):
        yield DRY(
            o.dry_multiplier,
            o.dry_base,
            o.dry_allowed_length,
            last_n=_last(o.dry_penalty_last_n),
            breakers=o.dry_sequence_breakers,
        )
    if o.no_repeat_ngram_size:
        yield NoRepeatNGram(o.no_repeat_ngram_size)
    if o.bad_words_ids is not None:
        # Hugging Face alone lets a text end even if its end is a bad token.
        yield BadWords(o.bad_words_ids, o.ends if order == "hf" else ())
    if o.min_length:
        yield MinLength(o.min_length, o.ends)
    if o.min_new_tokens:
        yield MinLength(o.min_new_tokens, o.ends, new=True)
    if o.allowed_token_ids is not None:
        yield AllowedIds(o.allowed_token_ids)
    if o.forced_bos_token_id is not None:
        yield ForcedTokens({1: [o.forced_bos_token_id]}, name="forced_bos_token_id")
    if o.forced_eos_token_id is not None and o.max_length is not None:
        forced_end = {o.max_length - 1: as_ids(o.forced_eos_token_id)}
        yield ForcedTokens(forced_end, name="forced_eos_token_id")
    if o.forced_tokens:
        yield ForcedTokens({position: as_ids(ids) for position, ids in o.forced_tokens.items()})
    if o.suppress_tokens:
        yield Suppress(o.suppress_tokens)
    if o.begin_suppress_tokens:
        forced = o.forced_bos_token_id is not None
        yield Suppress(o.begin_suppress_tokens, at_begin=True, forced_first=forced)
    if any_row(o.dynatemp_range, 0):
        yield DynamicTemperature(o.temperature, o.dynatemp_range, o.dynatemp_exponent)
    elif any_row(o.temperature, 1) or not o.do_sample:
        yield Temperature(o.temperature)
    if o.top_n_sigma is not None:
        yield TopNSigma(o.top_n_sigma)
    if o.top_h is not None:
        yield TopH(o.top_h)
    keep = o.min_tokens_to_keep
    if any_row(o.top_k, 0) and any_row(o.top_k, -1):
        yield TopK(_at_least(o.top_k, _MIN_K.get(order, keep)), ties=ties)
    if any_row(o.top_p, 1):
        yield TopP(o.top_p, min_tokens_to_keep=keep)
    if any_row(o.min_p, 0):
        yield MinP(o.min_p, min_tokens_to_keep=keep)
    if any_row(o.typical_p, 1):
        yield Typical(o.typical_p, min_tokens_to_keep=keep)
    if any_row(o.epsilon_cutoff, 0):
        yield Epsilon(o.epsilon_cutoff, min_tokens_to_keep=keep)
    if any_row(o.eta_cutoff, 0):
        yield Eta(o.eta_cutoff, min_tokens_to_keep=keep)
    if any_row(o.xtc_probability, 0):
        yield XTC(o.xtc_probability, o.xtc_threshold, min_tokens_to_keep=keep)
    if o.mirostat:
        version = Mirostat1 if o.mirostat == 1 else Mirostat2
        yield version(o.mirostat_tau, o.mirostat_eta)


def _last(n: int | None) -> int | None:
    """Return None for all ids, which an option may write as -1."""
    return None if n == -1 else n


def _at_least(k: PerRow, least: int) -> list[float] | float:
    """Raise top_k to min_tokens_to_keep; 0 and -1 still mean all tokens."""
    values = torch.as_tensor(k, dtype=torch.float64)
    raised: list[float] | float = torch.where(values > 0, values.clamp(min=least), values).tolist()
    return raised
