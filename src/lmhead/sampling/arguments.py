"""Validate the arguments of generation: prompts and stop conditions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lmhead import checks
from lmhead.sampling.model import Tokenizer

Stop = str | int | Sequence[str | int]


def is_single(prompt: Any) -> bool:
    """Return whether this is one prompt, not a list of prompts."""
    if isinstance(prompt, Tensor):
        if prompt.dim() not in (1, 2) or prompt.numel() == 0:
            raise ValueError(
                f"prompt must be ids of shape (L,) or (B, L), not empty; got {tuple(prompt.shape)}"
            )
        return prompt.dim() == 1
    if not isinstance(prompt, str | list | tuple):
        raise TypeError(
            f"prompt must be text, a list of ids, or a list of either; got {type(prompt).__name__}"
        )
    if isinstance(prompt, str):
        return True
    if not prompt:
        raise ValueError("prompt must have at least one token, or be a list of prompts; got []")
    return not isinstance(prompt[0], str | list | tuple | Tensor)


def prompt_ids(prompt: Any, tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids of one prompt, given as text or ids."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                f"prompt must be ids for a model without a tokenizer; got text {prompt[:40]!r}"
            )
        ids = tokenizer.encode(prompt)
    else:
        ids = id_list("prompt", prompt)
    if not ids:
        raise ValueError(f"prompt must have at least one token; got none in {prompt!r}")
    return ids


def id_list(name: str, ids: Any) -> list[int]:
    """Return ids as a list of integers."""
    if isinstance(ids, Tensor):
        checks.check_id_type(name, ids)
        ids = ids.tolist()
    if not isinstance(ids, list | tuple | set | frozenset | range):
        raise TypeError(f"{name} must be a list of ids; got {type(ids).__name__}")
    for id in ids:
        checks.check_integer(f"an id of {name}", id, low=0)
    return list(ids)


def stops(stop: Any, tokenizer: Tokenizer | None) -> tuple[tuple[str, ...], frozenset[int]]:
    """Return the stop strings and the stop ids."""
    if stop is None:
        return (), frozenset()
    if not isinstance(stop, str | int | list | tuple | set | frozenset):
        raise TypeError(
            f"stop must be a string, an id, or a list of both; got {type(stop).__name__}"
        )
    parts = [stop] if isinstance(stop, str | int) else list(stop)
    texts = tuple(part for part in parts if isinstance(part, str))
    if not all(texts):
        raise ValueError("stop must hold no empty string, which is found everywhere; got ''")
    if texts and tokenizer is None:
        raise ValueError(f"stop must be ids for a model without a tokenizer; got {texts[0]!r}")
    return texts, frozenset(id_list("stop", [part for part in parts if not isinstance(part, str)]))
