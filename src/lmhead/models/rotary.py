"""Rotary positions extended to longer texts: a divisor for the angle of each pair.

In:  `rope_parameters` of config.json, or `rope_scaling` and `rope_theta`.
Out: d/2 divisors.

    default     1
    linear      `factor`
    llama3      1 for high frequencies, `factor` for low ones, interpolated between (Llama 3.1)
    longrope    the divisors themselves, where those for short and long texts are the same and
                nothing else is scaled: how Llama models converted from GGUF are written

Other kinds (YaRN, dynamic) also change the attention, or depend on the length of the text:
`LlamaBody` does not support them.
"""

from __future__ import annotations

import math

from lmhead.models.model_files import Fields

_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "longrope": {
        "short_factor",
        "long_factor",
        "attention_factor",
        "original_max_position_embeddings",
    },
}
_NAMES = {"rope_type", "type", "rope_theta"}


def read_rotary(config: Fields) -> Fields:
    """Return the fields on rotary positions in one object, with `rope_type` and `rope_theta`."""
    values = {"rope_theta": config.number("rope_theta", 10000.0)}
    for name in ("rope_scaling", "rope_parameters"):
        values |= config.object(name).values
    fields = Fields(config.path, values, "rope_parameters.")
    kind = fields.text("rope_type", fields.text("type", "default"))
    return Fields(config.path, {**values, "rope_type": kind}, fields.prefix)


def is_known(rotary: Fields) -> bool:
    """Return whether `divisors` covers all of these fields."""
    keys = _KEYS.get(rotary.text("rope_type"))
    if keys is None or not set(rotary.values) - _NAMES <= keys:
        return False
    if rotary.text("rope_type") != "longrope":
        return True
    short, long = rotary.values.get("short_factor"), rotary.values.get("long_factor")
    return rotary.values.get("attention_factor") == 1.0 and short == long


def divisors(rotary: Fields, size: int) -> tuple[float, ...] | None:
    """Return the divisor of each of a head's `size` / 2 angles; None for ones.

    >>> from pathlib import Path
    >>> rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    >>> divisors(Fields(Path("config.json"), rope), 4)
    (4.0, 4.0)
    """
    kind = rotary.text("rope_type")
    if kind == "default":
        return None
    if kind == "longrope":
        return tuple(rotary.list_of(float, "short_factor", size // 2))
    factor = rotary.number("factor")
    if kind == "linear":
        return (factor,) * (size // 2)
    theta = rotary.number("rope_theta")
    low, high = rotary.number("low_freq_factor"), rotary.number("high_freq_factor")
    if not low < high:
        raise rotary.error("low_freq_factor", f"below high_freq_factor, {high}")
    length = rotary.number("original_max_position_embeddings")

    def divisor(speed: float) -> float:
        # The number of full turns within the texts that the model was first trained on.
        turns = length * speed / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        return 1 / ((1 - share) / factor + share)

    return tuple(divisor(theta ** (-2 * i / size)) for i in range(size // 2))
