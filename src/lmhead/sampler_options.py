"""The options of a sampler: names, defaults, ranges and help, in one table.

Names are those of Hugging Face, vLLM and llama.cpp. Read by `Sampler`, the command line and the
server. Does not import torch, so that `lmhead --help` is fast.
"""

# ruff: noqa: RUF009 - the calls in the defaults are dataclasses.field

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from lmhead.sampling.stage import PerRow

# Orders of the stages: as in Hugging Face, vLLM and llama.cpp.
Order = Literal["hf", "vllm", "llama.cpp"]
ORDERS: tuple[str, ...] = get_args(Order)

# Names of the same options in other programs.
ALIASES = {
    "min_tokens": "min_new_tokens",  # vLLM
    "stop_token_ids": "eos_token_id",  # vLLM
    "repeat_penalty": "repetition_penalty",  # llama.cpp
    "repeat_last_n": "penalty_last_n",  # llama.cpp
    "typ_p": "typical_p",  # llama.cpp
    "min_keep": "min_tokens_to_keep",  # llama.cpp
    "temp": "temperature",  # llama.cpp
}


def _option(help: str, default: Any, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help, "limits": limits})


def _number(
    help: str, default: Any, low: float = -math.inf, high: float = math.inf, *, above: bool = False
) -> Any:
    """Return an option in [low, high], or (low, high] if `above`."""
    return _option(help, default, low=low, high=high, above=above)


def _integer(help: str, default: Any, least: int) -> Any:
    return _option(help, default, low=least, integer=True)


@dataclass(frozen=True)
class Options:
    """Options of a sampler. Those of type `PerRow` may be a list, one value per row.

    `fields(Options)` has default, help and range of each.
    """

    do_sample: bool = _option("Sample; if not, take the most probable token.", True)
    temperature: PerRow = _number("Divides the logits; 0 takes the most probable token.", 1.0, 0.0)
    dynatemp_range: PerRow = _number(
        "Largest change of the temperature, by the entropy; 0 disables.", 0.0, 0.0
    )
    dynatemp_exponent: PerRow = _number(
        "Exponent of the dynamic temperature's dependence on entropy.", 1.0, 0.0
    )
    top_k: PerRow | None = _integer("Keep the k most probable tokens; 0 or -1 disables.", 0, -1)
    top_p: PerRow | None = _number(
        "Keep the most probable tokens up to this total probability; 1 disables.", 1.0, 0.0, 1.0
    )
    min_p: PerRow | None = _number(
        "Minimum probability, relative to the most probable token; 0 disables.", 0.0, 0.0, 1.0
    )
    top_h: PerRow | None = _number(
        "Keep the most probable tokens up to this share of the entropy.", None, 0.0, 1.0, above=True
    )
    typical_p: PerRow | None = _number(
        "Keep tokens of surprisal near the entropy, up to this total probability; 1 disables.",
        1.0,
        0.0,
        1.0,
        above=True,
    )
    epsilon_cutoff: PerRow | None = _number(
        "Minimum probability of a candidate token; 0 disables.", 0.0, 0.0, 1.0
    )
    eta_cutoff: PerRow | None = _number(
        "Minimum probability, lower if the entropy is high; 0 disables.", 0.0, 0.0, 1.0
    )
    top_n_sigma: PerRow | None = _number(
        "Keep logits within this number of standard deviations of the largest.", None
    )
    xtc_probability: PerRow = _number(
        "Probability of removing the tokens above --xtc-threshold but one (XTC); 0 disables.",
        0.0,
        0.0,
        1.0,
    )
    xtc_threshold: PerRow = _number(
        "XTC removes tokens of at least this probability, except the least probable.", 0.1, 0.0, 1.0
    )
    mirostat: int = _option("Mirostat version 1 or 2; 0 disables.", 0)
    mirostat_tau: PerRow = _number("Target surprisal of mirostat, in bits.", 5.0, 0.0)
    mirostat_eta: PerRow = _number("Learning rate of mirostat.", 0.1, 0.0)
    repetition_penalty: PerRow | None = _number(
        "Divides positive logits of earlier tokens, multiplies negative ones; 1 disables.",
        1.0,
        0.0,
        above=True,
    )
    frequency_penalty: PerRow = _number(
        "Subtracted from a logit for each earlier occurrence of the token.", 0.0
    )
    presence_penalty: PerRow = _number(
        "Subtracted from a logit if the token occurred earlier.", 0.0
    )
    penalty_last_n: int | None = _integer(
        "Number of last tokens that the three penalties count; -1 for all.", None, -1
    )
    dry_multiplier: PerRow = _number(
        "Strength of the penalty on repeated sequences (DRY); 0 disables.", 0.0, 0.0
    )
    dry_base: float = _number("Growth of the DRY penalty with the length of the repeat.", 1.75, 1.0)
    dry_allowed_length: int = _integer("Longest repeat without DRY penalty.", 2, 1)
    dry_penalty_last_n: int | None = _integer(
        "Number of last tokens that DRY looks at; -1 for all.", None, -1
    )
    dry_sequence_breakers: Sequence[int | Sequence[int]] = _option(
        "Token ids, or sequences of them, at which DRY's repeats end.", ()
    )
    no_repeat_ngram_size: int | None = _integer(
        "Forbid repeating any n-gram of this length; 0 disables.", 0, 0
    )
    logit_bias: Mapping[int, float] | None = _option("{token id: value added to its logit}.", None)
    sequence_bias: Mapping[tuple[int, ...], float] | None = _option(
        "{(id, id): value added to the last one's logit after the others}.", None
    )
    bad_words_ids: Sequence[Sequence[int]] | None = _option(
        "Forbidden sequences of token ids.", None
    )
    allowed_token_ids: Sequence[int] | None = _option("Only these token ids are allowed.", None)
    suppress_tokens: Sequence[int] | None = _option("Forbidden token ids.", None)
    begin_suppress_tokens: Sequence[int] | None = _option(
        "Token ids that are forbidden as the first new token.", None
    )
    eos_token_id: int | Sequence[int] | None = _option(
        "End-of-text token ids; min_length and min_new_tokens need them.", None
    )
    min_length: int | None = _integer(
        "Forbid end-of-text tokens before this number of tokens, with the prompt.", 0, 0
    )
    min_new_tokens: int | None = _integer(
        "Forbid end-of-text tokens before this number of new tokens.", 0, 0
    )
    forced_bos_token_id: int | None = _option("Token id forced as the second token.", None)
    forced_eos_token_id: int | Sequence[int] | None = _option(
        "Token id forced at max_length.", None
    )
    max_length: int | None = _integer("Length at which forced_eos_token_id is forced.", None, 0)
    forced_tokens: Mapping[int, int | Sequence[int]] | None = _option(
        "{number of tokens so far: forced token id}.", None
    )
    guidance_scale: PerRow | None = _number(
        "Classifier-free guidance; a call then needs `unconditional`.", 1.0
    )
    min_tokens_to_keep: int = _integer(
        "Minimum number of tokens that truncation by probability keeps.", 1, 1
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            if f.metadata["limits"]:
                _check_numbers(f.name, getattr(self, f.name), **f.metadata["limits"])
        if self.mirostat not in (0, 1, 2):
            raise ValueError(f"mirostat must be 0, 1 or 2; got {self.mirostat!r}")
        if self.allowed_token_ids is not None and len(self.allowed_token_ids) == 0:
            raise ValueError("allowed_token_ids must allow at least one id; got none")
        _check_sequences("bad_words_ids", self.bad_words_ids)
        _check_sequences("sequence_bias", self.sequence_bias)
        if self.ends == () and (self.min_length or self.min_new_tokens):
            name = "min_length" if self.min_length else "min_new_tokens"
            raise ValueError(f"{name} needs eos_token_id")
        if self.forced_eos_token_id is not None and self.max_length is None:
            raise ValueError("forced_eos_token_id needs max_length")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Return options from keyword arguments, which may have the names of other programs."""
        known = {f.name for f in fields(cls)}
        options: dict[str, Any] = {}
        for name, value in given.items():
            standard_name = ALIASES.get(name, name)
            if standard_name not in known:
                raise TypeError(f"Sampler has no option {name!r}; {_nearest(name, known)}")
            if standard_name in options:
                raise TypeError(f"{name} and {standard_name} are the same option; give one of them")
            options[standard_name] = value
        return cls(**options)

    @property
    def ends(self) -> tuple[int, ...]:
        """End-of-text token ids."""
        return as_ids(self.eos_token_id)


def as_ids(ids: Any) -> tuple[int, ...]:
    """Return one id, several or none as a tuple."""
    if ids is None:
        return ()
    if isinstance(ids, int):
        return (ids,)
    return tuple(int(i) for i in (ids.flatten().tolist() if hasattr(ids, "flatten") else ids))


def _check_numbers(
    name: str,
    value: Any,
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    integer: bool = False,
) -> None:
    if value is None:
        return
    if integer:
        requirement = f"{name} must be an integer of at least {low}"
    elif low == -math.inf:
        requirement = f"{name} must be a finite number"
    else:
        requirement = f"{name} must be a number {'above' if above else 'from'} {low:g}"
        requirement += "" if high == math.inf else f" {'up ' if above else ''}to {high:g}"
    for number in _each(name, value, requirement):
        if isinstance(number, bool) or not isinstance(number, int if integer else int | float):
            raise TypeError(f"{requirement}; got {number!r}")
        inside = low < number <= high if above else low <= number <= high
        if not inside or abs(number) == math.inf:
            raise ValueError(f"{requirement}; got {number}")


def _each(name: str, value: Any, requirement: str) -> list[Any]:
    """Return a number, or the numbers of a list or tensor, as a list."""
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        return [value]
    if len(value) == 0:
        raise ValueError(
            f"{requirement}, or one per row; got an empty {type(value).__name__} for {name}"
        )
    return list(value)


def _check_sequences(name: str, sequences: Any) -> None:
    if sequences is None:
        return
    if len(sequences) == 0:
        raise ValueError(f"{name} must not be empty")
    for sequence in sequences:
        if isinstance(sequence, int) or len(sequence) == 0:
            raise ValueError(f"{name} must hold sequences of at least one id; got {sequence!r}")


def _nearest(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "see lmhead.sampling.Options"
