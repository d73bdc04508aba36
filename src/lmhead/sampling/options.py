"""The options of a sampler, by the names that Hugging Face, vLLM and llama.cpp give them.

Each option, its default and its range stand here, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lmhead.sampling.stage import PerRow

# Other programs' names.
SPELLINGS = {
    "min_tokens": "min_new_tokens",  # vLLM
    "stop_token_ids": "eos_token_id",  # vLLM
    "repeat_penalty": "repetition_penalty",  # llama.cpp
    "repeat_last_n": "penalty_last_n",  # llama.cpp
    "typ_p": "typical_p",  # llama.cpp
    "min_keep": "min_tokens_to_keep",  # llama.cpp
    "temp": "temperature",  # llama.cpp
}


@dataclass(frozen=True)
class Options:
    """What a sampler can be asked for. Numbers marked `PerRow` may be a list, one per row.

    Attributes:
        do_sample: draw a word; False for the best one, as with temperature 0.
        temperature: divides the logits; 0 for the best word.
        dynatemp_range: temperature ± this, by the entropy.
        dynatemp_exponent: how the dynamic temperature follows the entropy.
        top_k: keep so many words; 0 or -1 for all.
        top_p: keep the best words until they reach this probability.
        min_p: keep words with at least this share of the best word's probability.
        top_h: keep the best words up to this share of the entropy.
        typical_p: keep the words of typical surprise until they reach this probability.
        epsilon_cutoff: keep words of at least this probability.
        eta_cutoff: keep words of at least this probability, less where the entropy is high.
        top_n_sigma: keep words within so many standard deviations of the best one.
        xtc_probability: how often to strike out all likely words but the last.
        xtc_threshold: from this probability on a word is likely.
        mirostat: aim at a surprise of tau bits: version 1 or 2; 0 for off.
        mirostat_tau: the surprise that mirostat aims at, in bits.
        mirostat_eta: how fast mirostat learns.
        repetition_penalty: divides the logits of words that came before; the order says which ids
            count.
        frequency_penalty: lowers a logit by this for each time that the word came before.
        presence_penalty: lowers a logit by this if the word came before.
        penalty_last_n: how many ids the three penalties look back at; -1 for all.
        dry_multiplier: how strongly to act against repeating sequences; 0 for not.
        dry_base: how fast that grows with the length of the repeated sequence.
        dry_allowed_length: what may repeat for nothing.
        dry_penalty_last_n: how many ids DRY looks back at; -1 for all.
        dry_sequence_breakers: ids, or sequences of them, that no repetition reaches across.
        no_repeat_ngram_size: no n-gram twice, n being this; 0 for off.
        logit_bias: {id: what is added to its logit}.
        sequence_bias: {(id, id): what is added to the last one's logit behind the others}.
        bad_words_ids: sequences of ids that must not come.
        allowed_token_ids: the ids that alone may come.
        suppress_tokens: ids that must not come.
        begin_suppress_tokens: ids that must not come first.
        eos_token_id: the ids that end a text; min_length and min_new_tokens need them.
        min_length: no end before so many ids, with the prompt.
        min_new_tokens: no end before so many new ids.
        forced_bos_token_id: the id that comes second.
        forced_eos_token_id: the id that comes at max_length.
        max_length: where forced_eos_token_id is forced.
        forced_tokens: {number of ids so far: id}.
        guidance_scale: classifier-free guidance; a call needs `unconditional` then.
        min_tokens_to_keep: no cut by probability leaves fewer words.
    """

    do_sample: bool = True
    temperature: PerRow = 1.0
    dynatemp_range: PerRow = 0.0
    dynatemp_exponent: PerRow = 1.0
    top_k: PerRow | None = 0
    top_p: PerRow | None = 1.0
    min_p: PerRow | None = 0.0
    top_h: PerRow | None = None
    typical_p: PerRow | None = 1.0
    epsilon_cutoff: PerRow | None = 0.0
    eta_cutoff: PerRow | None = 0.0
    top_n_sigma: PerRow | None = None
    xtc_probability: PerRow = 0.0
    xtc_threshold: PerRow = 0.1
    mirostat: int = 0
    mirostat_tau: PerRow = 5.0
    mirostat_eta: PerRow = 0.1
    repetition_penalty: PerRow | None = 1.0
    frequency_penalty: PerRow = 0.0
    presence_penalty: PerRow = 0.0
    penalty_last_n: int | None = None
    dry_multiplier: PerRow = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Sequence[int | Sequence[int]] = ()
    no_repeat_ngram_size: int | None = 0
    logit_bias: Mapping[int, float] | None = None
    sequence_bias: Mapping[tuple[int, ...], float] | None = None
    bad_words_ids: Sequence[Sequence[int]] | None = None
    allowed_token_ids: Sequence[int] | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    eos_token_id: int | Sequence[int] | None = None
    min_length: int | None = 0
    min_new_tokens: int | None = 0
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | Sequence[int] | None = None
    max_length: int | None = None
    forced_tokens: Mapping[int, int | Sequence[int]] | None = None
    guidance_scale: PerRow | None = 1.0
    min_tokens_to_keep: int = 1

    def __post_init__(self) -> None:
        for name, (low, high, open_low) in _RANGES.items():
            _check_numbers(name, getattr(self, name), low, high, open_low=open_low)
        for name, least in _WHOLE.items():
            _check_whole(name, getattr(self, name), least)
        if self.mirostat not in (0, 1, 2):
            raise ValueError(f"mirostat must be 0, 1 or 2; got {self.mirostat!r}")
        for name in ("allowed_token_ids", "suppress_tokens", "begin_suppress_tokens"):
            ids = getattr(self, name)
            if ids is not None and len(ids) == 0 and name == "allowed_token_ids":
                raise ValueError("allowed_token_ids must allow at least one id; got none")
        _check_sequences("bad_words_ids", self.bad_words_ids)
        _check_sequences("sequence_bias", self.sequence_bias)
        if self.ends == () and (self.min_length or self.min_new_tokens):
            name = "min_length" if self.min_length else "min_new_tokens"
            raise ValueError(f"{name} needs eos_token_id, the ids that end a text")
        if self.forced_eos_token_id is not None and self.max_length is None:
            raise ValueError("forced_eos_token_id needs max_length, where it is forced")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """From keyword arguments in anyone's spelling."""
        known = {f.name for f in fields(cls)}
        options: dict[str, Any] = {}
        for name, value in given.items():
            own = SPELLINGS.get(name, name)
            if own not in known:
                raise TypeError(f"Sampler has no option {name!r}; {_nearest(name, known)}")
            if own in options:
                raise TypeError(f"{name} and {own} are the same option; give one of them")
            options[own] = value
        return cls(**options)

    @property
    def ends(self) -> tuple[int, ...]:
        """The ids that end a text."""
        return as_ids(self.eos_token_id)


def as_ids(ids: int | Sequence[int] | Tensor | None) -> tuple[int, ...]:
    """One id, or several, or none."""
    if ids is None:
        return ()
    if isinstance(ids, int):
        return (ids,)
    return tuple(int(i) for i in torch.as_tensor(ids).reshape(-1).tolist())


# low, high, whether low itself is out.
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, math.inf, False),
    "dynatemp_range": (0.0, math.inf, False),
    "dynatemp_exponent": (0.0, math.inf, False),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, False),
    "top_h": (0.0, 1.0, True),
    "typical_p": (0.0, 1.0, True),
    "epsilon_cutoff": (0.0, 1.0, False),
    "eta_cutoff": (0.0, 1.0, False),
    "top_n_sigma": (-math.inf, math.inf, False),
    "xtc_probability": (0.0, 1.0, False),
    "xtc_threshold": (0.0, 1.0, False),
    "mirostat_tau": (0.0, math.inf, False),
    "mirostat_eta": (0.0, math.inf, False),
    "repetition_penalty": (0.0, math.inf, True),
    "frequency_penalty": (-math.inf, math.inf, False),
    "presence_penalty": (-math.inf, math.inf, False),
    "dry_multiplier": (0.0, math.inf, False),
    "dry_base": (1.0, math.inf, False),
    "guidance_scale": (-math.inf, math.inf, False),
}
_WHOLE: dict[str, int] = {
    "top_k": -1,
    "penalty_last_n": -1,
    "dry_allowed_length": 1,
    "dry_penalty_last_n": -1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_length": 0,
    "min_tokens_to_keep": 1,
}


def _check_numbers(name: str, value: Any, low: float, high: float, *, open_low: bool) -> None:
    if value is None:
        return
    must = f"{name} must be a number {'above' if open_low else 'from'} {low:g}"
    must += "" if high == math.inf else f" {'up ' if open_low else ''}to {high:g}"
    if low == -math.inf:
        must = f"{name} must be a finite number"
    for one in _each(name, value, must):
        if isinstance(one, bool) or not isinstance(one, int | float):
            raise TypeError(f"{must}; got {one!r}")
        if not math.isfinite(one) or one < low or one > high or (open_low and one == low):
            raise ValueError(f"{must}; got {one}")


def _check_whole(name: str, value: Any, least: int) -> None:
    if value is None:
        return
    must = f"{name} must be a whole number of at least {least}"
    for one in _each(name, value, must):
        if isinstance(one, bool) or not isinstance(one, int):
            raise TypeError(f"{must}; got {one!r}")
        if one < least:
            raise ValueError(f"{must}; got {one}")


def _each(name: str, value: Any, must: str) -> list[Any]:
    """A number, or the numbers of a list."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, str | bytes) or not hasattr(value, "__len__"):
        return [value]
    if len(value) == 0:
        raise ValueError(f"{must}, or one per row; got an empty {type(value).__name__} for {name}")
    return list(value)


def _check_sequences(name: str, sequences: Any) -> None:
    if sequences is None:
        return
    if len(sequences) == 0:
        raise ValueError(f"{name} must not be empty")
    for one in sequences:
        if isinstance(one, int) or len(one) == 0:
            raise ValueError(f"{name} must hold sequences of at least one id; got {one!r}")


def _nearest(name: str, known: set[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "see lmhead.sampling.Options"
