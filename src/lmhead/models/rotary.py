"""Rotary positions that are stretched to longer texts: a divisor for the angle of each pair.

In:  what `config.json` says of them (`rope_parameters`, or `rope_scaling` and `rope_theta`).
Out: d/2 divisors.

    default     1
    linear      `factor`
    llama3      1 for pairs that turn fast, `factor` for those that turn slowly, and a passage
                between the two: Llama 3.1 and later
    longrope    the divisors themselves, where those for short and long texts are the same and
                nothing else is scaled: how a GGUF file of a Llama is written down

Others (YaRN, dynamic) also change the attention, or change with the length of a text: they are not
for `LlamaBody`.
"""

from __future__ import annotations

import math
from typing import Any

_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
    "longrope": {
        "short_factor",
        "long_factor",
        "attention_factor",
        "original_max_position_embeddings",
    },
}
_NAMES = {"rope_type", "type", "rope_theta"}


def read_rotary(config: dict[str, Any]) -> dict[str, Any]:
    """What a configuration says of rotary positions, in one place and with a `rope_type`."""
    found = {"rope_theta": config.get("rope_theta") or 10000.0}
    for name in ("rope_scaling", "rope_parameters"):
        found |= config.get(name) or {}
    return {**found, "rope_type": found.get("rope_type") or found.get("type") or "default"}


def is_known(rotary: dict[str, Any]) -> bool:
    """Whether `divisors` says all that there is to say."""
    keys = _KEYS.get(rotary["rope_type"])
    if keys is None or not set(rotary) - _NAMES <= keys:
        return False
    if rotary["rope_type"] != "longrope":
        return True
    return rotary.get("attention_factor") == 1.0 and rotary.get("short_factor") == rotary.get(
        "long_factor"
    )


def divisors(rotary: dict[str, Any], size: int) -> tuple[float, ...] | None:
    """The divisor of each of a head's `size` / 2 angles; None for ones.

    >>> divisors({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 4)
    (4.0, 4.0)

    Raises:
        ValueError, TypeError: a number is missing or makes no sense.
    """
    kind = rotary["rope_type"]
    if kind == "default":
        return None
    if kind == "longrope":
        return tuple(map(float, rotary.get("short_factor") or ()))
    factor = _number(rotary, "factor")
    if kind == "linear":
        return (factor,) * (size // 2)
    theta = float(rotary["rope_theta"])
    return tuple(_llama3(rotary, factor, theta ** (-2 * i / size)) for i in range(size // 2))


def _llama3(rotary: dict[str, Any], factor: float, speed: float) -> float:
    """The divisor of a pair that turns by `speed` radians a token."""
    low, high = _number(rotary, "low_freq_factor"), _number(rotary, "high_freq_factor")
    if not low < high:
        raise ValueError(f"low_freq_factor must be below high_freq_factor, {high}; got {low}")
    # How often the pair turns round within the texts that the model was first trained on.
    rounds = _number(rotary, "original_max_position_embeddings") * speed / (2 * math.pi)
    share = min(1.0, max(0.0, (rounds - low) / (high - low)))
    return 1 / ((1 - share) / factor + share)


def _number(rotary: dict[str, Any], name: str) -> float:
    value = rotary.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} of the rotary positions must be a number above 0; got {value!r}")
    return float(value)
