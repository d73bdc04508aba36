"""Numbers that hold the page's TypeScript to the textbook: written to explorer/tests/golden.json.

In:  `lmhead.reference`; for chains of penalties and cuts `lmhead.Sampler`, which explains them.
Out: a JSON file that Vitest reads; `test_golden.py` checks that it is up to date. After a change,
write it again with `python tests/explorer/golden.py`.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmhead import Sampler
from lmhead import reference as ref
from lmhead.cli._toy_demo import HIDDEN, WEIGHT
from lmhead.sampler_options import ORDERS, Options
from lmhead.sampling.stage import Stage
from lmhead.sampling.stage_order import stages_of

FILE = Path(__file__).resolve().parents[2] / "explorer" / "tests" / "golden.json"
COUNTS = [50, 30, 20, 12, 6, 2]  # how often the six words were seen
FORKS = [[0.5, -0.2, 0.3], [-0.4, 0.6, 0.1], [0.2, 0.8, -0.6], [0.3, -0.7, 0.2], [-0.5, 0.4, 0.6]]

FILTERS: dict[str, Callable[[Any, float], Any]] = {
    "temperature": ref.temperature_scale,
    "top_k": lambda z, k: ref.top_k_filter(z, int(k)),
    "top_p": ref.top_p_filter,
    "min_p": ref.min_p_filter,
    "typical_p": ref.typical_filter,
}
SETTINGS: dict[str, list[float]] = {
    "temperature": [0.3, 2.5],
    "top_k": [1, 3, 100],
    "top_p": [0.0, 0.3, 0.9, 1.0],
    "min_p": [0.0, 0.2, 1.0],
    "typical_p": [0.2, 0.8, 1.0],
}
CHAINS: list[list[tuple[str, float]]] = [
    [("temperature", 0.5), ("top_p", 0.8)],
    [("top_p", 0.8), ("temperature", 0.5)],
    [("temperature", 2.0), ("top_k", 4), ("top_p", 0.7), ("min_p", 0.4), ("typical_p", 0.9)],
    [("top_k", 4), ("typical_p", 0.9), ("top_p", 0.7), ("min_p", 0.4), ("temperature", 2.0)],
    [("min_p", 0.05), ("typical_p", 0.5)],
]

SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.95, "min_p": 0.02},
    {"typical_p": 0.2},
    {"typical_p": 0.9, "temperature": 0.7, "min_p": 0.01},
    {"temperature": 1.7, "top_k": 25, "typical_p": 0.6, "top_p": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.6, "temperature": 0.8},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {"presence_penalty": 2.0, "top_k": 5},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.6}
    | {"temperature": 0.9, "top_k": 60, "top_p": 0.97, "min_p": 0.01, "typical_p": 0.8},
    {"temperature": 1.1, "dynatemp_range": 0.6, "dynatemp_exponent": 1.3, "top_p": 0.9},
    {"top_n_sigma": 1.0, "temperature": 1.5},
    {"top_h": 0.4},
    {"top_h": 1.0, "temperature": 2.0},
    {"epsilon_cutoff": 0.003},
    {"eta_cutoff": 0.02, "temperature": 0.8},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"xtc_probability": 0.01, "xtc_threshold": 0.05, "top_k": 30},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"dry_multiplier": 1.5, "dry_base": 2.0, "repetition_penalty": 1.1, "temperature": 0.9},
    {"mirostat": 1, "mirostat_tau": 2.0},  # not of a single token, which the library divides by
    {"mirostat": 2, "mirostat_tau": 1.5, "temperature": 1.3},
]
OWN_ORDERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"temperature": 0.6, "top_p": 0.8, "top_k": 9}, ["top_p", "temperature", "top_k"]),
    (
        {"repetition_penalty": 1.4, "min_p": 0.1, "temperature": 0.5},
        ["temperature", "min_p", "repetition_penalty"],
    ),
    (
        {"xtc_probability": 0.9, "typical_p": 0.7, "dry_multiplier": 1.0, "top_n_sigma": 2.0},
        ["typical_p", "dry_multiplier", "xtc_probability", "top_n_sigma"],
    ),
]
SEED = 7


def golden() -> dict[str, Any]:
    """Everything the page computes, on rows of several kinds."""
    rows = _rows()
    return {
        "hidden": HIDDEN,
        "weight": WEIGHT,
        "linear": [{"x": x, "y": ref.linear(x, WEIGHT)} for x in (HIDDEN, [0.3, -2.5, 1.7])],
        "layer_norm": [{"x": x, "y": ref.layer_norm(x)} for x in [*rows[:-1], np.full(3, 5.0)]],
        "softmax": [
            {"z": z, "t": t, "p": ref.softmax(z, temperature=t), "entropy": ref.entropy(z / t)}
            for z in rows
            for t in (0.1, 0.7, 1.0, 3.0)
        ],
        "log_softmax": [{"z": z, "y": ref.log_softmax(z)} for z in rows],
        "normalize": [{"x": x, "y": ref.normalize(x)} for x in ([1.0, 2.0, 3.0], [-1.0, 2.0, 0.5])],
        "sigmoid": [{"x": x, "y": ref.sigmoid(x)} for x in ([-1000.0, -2.0, 0.0, 0.3, 40.0],)],
        "formats": [_in_format(z, kind) for z in _large_rows() for kind in ("fp32", "fp16")],
        "filters": [
            {"name": name, "value": value, "z": z, "out": FILTERS[name](z, value)}
            for name, values in SETTINGS.items()
            for value in values
            for z in rows
        ],
        "chains": [
            {"stages": chain, "z": z, "out": _run(chain, z)} for chain in CHAINS for z in rows
        ],
        "noise": [
            {"seed": seed, "position": position, "id": word, "stream": stream}
            | {"u": ref.philox_uniform(seed, position, word, stream=stream)}
            for seed, position, word, stream in [
                (0, 0, 0, 0),
                (42, 0, 1, 0),
                (42, 999, 5, 0),
                (7, 3, 262_143, 1),
                (2**53 - 1, 2**40 + 17, 4_294_967_295, 0),
                (2**32 - 1, 2**32, 2, 3),
            ]
        ],
        "draws": [
            {"z": z, "seed": seed, "tokens": _draws(np.asarray(z), seed, 200)}
            for z in rows
            for seed in (0, 42, 123_456_789_012)
        ],
        "loss": [
            {"z": z, "target": target, "smoothing": smoothing}
            | {"loss": ref.cross_entropy(z, target, label_smoothing=smoothing)}
            | {"gradient": ref.cross_entropy_backward(z, target, label_smoothing=smoothing)}
            for z in rows
            if np.isfinite(z).all()
            for target in (0, 2)
            for smoothing in (0.0, 0.1, 1.0)
        ],
        "step": [_step(target, rate) for target, rate in ((1, 0.1), (4, 0.5))],
        "tree": _tree(),
        "sampler_rows": _sampler_rows(),
        "samplers": [
            _sampled(row, settings, order)
            for settings in SAMPLERS
            for order in ("hf", "llama.cpp")
            for row in range(settings.get("mirostat") == 1, len(_sampler_rows()))
        ],
        "own_orders": [
            _sampled(row, settings, names)
            for settings, names in OWN_ORDERS
            for row in range(len(_sampler_rows()))
        ],
        "orders": {order: _names(stages_of(EVERYTHING, order, "lowest")) for order in ORDERS},
    }


EVERYTHING = Options.of(
    {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "dry_multiplier": 1.0}
    | {"temperature": 0.5, "top_n_sigma": 1.0, "top_h": 0.5, "top_k": 5, "top_p": 0.5}
    | {"min_p": 0.1, "typical_p": 0.5, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1}
    | {"xtc_probability": 0.5, "mirostat": 2}
)


def _names(stages: list[Stage]) -> list[str]:
    return [stage.name for stage in stages]


def _rows() -> list[np.ndarray]:
    rng = np.random.default_rng(20)
    logits = ref.linear(HIDDEN, WEIGHT)
    struck = logits.copy()
    struck[[1, 4]] = -np.inf
    equal = np.array([1.0, 1.0, 0.5, 0.5, 1.0])
    return [logits, equal, rng.normal(0, 3, 12), rng.normal(500, 40, 8), struck]


def _large_rows() -> list[np.ndarray]:
    logits = ref.linear(HIDDEN, WEIGHT)
    rows = []
    for first in (3.1, 11.0, 11.2, 88.0, 88.7, 88.8, 120.0):
        row = logits.copy()
        row[0] = first
        rows.append(row)
    return [*rows, np.array([88.5, 88.5, 1.0])]  # each fits, their sum does not


def _in_format(z: np.ndarray, kind: str) -> dict[str, Any]:
    dtype = {"fp32": np.float32, "fp16": np.float16}[kind]
    with np.errstate(all="ignore"):
        x = z.astype(dtype)
        e = np.exp(x)
        shifted = np.exp(x - x.max())
        naive, stable = e / e.sum(dtype=dtype), shifted / shifted.sum(dtype=dtype)
    return {"z": z, "format": kind, "exponentials": e, "naive": naive, "stable": stable}


def _run(chain: list[tuple[str, float]], z: Any) -> Any:
    for name, value in chain:
        z = FILTERS[name](z, value)
    return z


def _draws(z: np.ndarray, seed: int, count: int) -> list[int]:
    ids = np.arange(len(z))
    return [int(np.argmax(z + ref.philox_gumbel(seed, at, ids))) for at in range(count)]


def _step(target: int, rate: float) -> dict[str, Any]:
    grads = ref.linear_cross_entropy_backward(HIDDEN, WEIGHT, target, label_smoothing=0.1)
    return {
        "target": target,
        "smoothing": 0.1,
        "rate": rate,
        "weight": WEIGHT - rate * grads.weight,
        "before": ref.linear_cross_entropy(HIDDEN, WEIGHT, target, label_smoothing=0.1),
    }


def _tree() -> dict[str, Any]:
    tree = ref.huffman_tree(COUNTS)
    p = ref.leaf_probabilities(HIDDEN, FORKS, tree)
    return {"counts": COUNTS, "forks": FORKS, "paths": tree.paths, "p": p}


def _sampler_rows() -> list[dict[str, Any]]:
    """Logits as float32 has them, with equal ones and masked ones, after some context."""
    rng = np.random.default_rng(21)
    coarse = np.round(rng.normal(0, 2, 40) * 4) / 4  # as of a model in few bits: many are equal
    coarse[[3, 17]] = -np.inf
    fine = rng.normal(1, 3, 200).astype(np.float32).astype(float)
    best = np.argsort(-fine)
    return [
        {"logits": [0.5], "prompt": [0], "output": []},
        {"logits": coarse, "prompt": [1, 3, 5, 5, 8], "output": [5, 30, 30, 39]},
        {"logits": fine, "prompt": [0, *best[:4], *range(70)], "output": [*best[2:5], best[4]]},
        {"logits": fine, "prompt": [*best[:6], 7, *best[:5]], "output": [best[5], 7, *best[:3]]},
    ]


def _sampled(row: int, settings: dict[str, Any], order: str | list[str]) -> dict[str, Any]:
    """What the library's sampler does to a row: its steps, what it leaves, and its token."""
    given = _sampler_rows()[row]
    z = torch.tensor(np.asarray(given["logits"], dtype=float))[None]
    ids = [[int(id) for id in (*given["prompt"], *given["output"])]]
    if isinstance(order, str):
        sampler = Sampler(order=order, seed=SEED, **settings)
    else:
        stages = {stage.name: stage for stage in Sampler(**settings).stages}
        sampler = Sampler(stages=[stages[name] for name in order], seed=SEED)
    length = len(given["prompt"])
    found = sampler(z, ids, prompt_length=length)
    p = sampler.process(z, ids, prompt_length=length)[0].softmax(-1)
    steps = sampler.explain(z, ids, prompt_length=length).steps[0]
    return {
        "row": row,
        "settings": settings,
        "order": order,
        "kept": found.kept[0].tolist(),
        "p": p[found.kept[0]].tolist(),
        "token": int(found.token),
        "steps": [
            {"stage": step.stage, "words": step.kept, "mass": step.mass}
            | {"entropy": step.entropy, "best": step.best, "best_prob": step.best_prob}
            for step in steps
        ],
    }


def plain(x: Any) -> Any:
    """The same in what JSON has; numbers it lacks become "inf", "-inf", "nan"."""
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    if isinstance(x, np.ndarray | np.generic):
        return plain(x.astype(float).tolist() if x.dtype.kind == "f" else x.tolist())
    if isinstance(x, list | tuple):
        return [plain(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


if __name__ == "__main__":
    FILE.write_text(json.dumps(plain(golden()), separators=(",", ":")) + "\n", encoding="utf-8")
