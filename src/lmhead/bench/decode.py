"""One token from a hidden state: certified decode beside full products.

Everybody has the same head and the same hidden states, in one process, one call after the other.
Before anything is timed, tokens are compared: ours must be those of float64; the others' are shown.
`bytes` is what must be read of the weight, or of its copy, for one token.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lmhead.bench import machine
from lmhead.bench.report import Columns, Document, conditions, table
from lmhead.bench.runner import Progress
from lmhead.bench.statistics import ratio, summary

if TYPE_CHECKING:
    from torch import Tensor

    from lmhead import Sampler
    from lmhead.screen import ScreenedHead

STATES = 8  # distinct hidden states that a round goes through
GROWTH: tuple[int, ...] = (16384, 65536, 262144, 1048576)
_GROWTH_HIDDEN = 512
_TOP_P: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}


@dataclass(frozen=True)
class Setting:
    """A head, a batch, and what is asked of it."""

    name: str
    vocab: int
    hidden_size: int
    batch: int = 1
    sampled: bool = False
    # Our largest time as a share of a peer's: {ours: {peer: share}}.
    goals: tuple[tuple[str, str, float], ...] = ()


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "argmax",
        128256,
        2048,
        goals=(
            ("screen 8", "float32", 0.25),
            ("screen 8", "bfloat16", 0.42),
            ("screen 8", "int8", 0.62),
            ("screen 4+4", "float32", 0.16),
        ),
    ),
    Setting("top-p", 262144, 640, sampled=True, goals=(("screen 8", "hugging face", 0.12),)),
    Setting("batch of 8", 262144, 640, batch=8, goals=(("screen 8", "float32", 0.25),)),
)


@dataclass(frozen=True)
class _Way:
    """One way to get the tokens: hidden (B, D) to ids (B,)."""

    name: str
    step: Callable[[Tensor], Tensor]
    bytes: int
    ours: bool = False


def decode(
    settings: Sequence[Setting],
    growth: Sequence[int],
    progress: Progress,
    *,
    rounds: int = 7,
    threads: int | None = None,
) -> Document:
    """Time every setting, and one head after the other of growing vocabularies.

    Ctrl-C ends the run early; what was measured until then is returned.
    """
    import torch

    from lmhead.sweep import native

    if threads is not None:
        torch.set_num_threads(threads)
    results: list[dict[str, Any]] = []
    series: list[dict[str, Any]] = []
    document: Document = {
        "benchmark": "decode",
        "title": "a token from a hidden state",
        "rounds": rounds,
        "interrupted": False,
        "native": native.core is not None,
        **machine.describe(torch.get_num_threads()),
        "results": results,
        "growth": series,
        "growth_hidden_size": _GROWTH_HIDDEN,
    }
    try:
        progress("reading memory")
        document["read_gb_per_s"] = _read_rate()
        results.extend(_measure(setting, rounds, progress) for setting in settings)
        for vocab in growth:
            setting = Setting(f"V = {vocab:,}", vocab, _GROWTH_HIDDEN)
            series.append(_measure(setting, max(3, rounds // 2), progress))
    except KeyboardInterrupt:
        document["interrupted"] = True
    return document


def _read_rate() -> float:
    """GB/s at which all threads read memory: the best of a few sums of 512 MiB."""
    import torch

    block = torch.ones(2**27, dtype=torch.float32)
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - begin)
    return block.nbytes / best / 1e9


def _measure(setting: Setting, rounds: int, progress: Progress) -> dict[str, Any]:
    import torch

    from lmhead import LMHead
    from lmhead.bench.generator import generate
    from lmhead.screen import ScreenedHead

    where = f"{setting.name}, {setting.vocab:,} x {setting.hidden_size}"
    progress(f"{where}: head")
    inputs = generate(setting.vocab, setting.hidden_size, STATES * setting.batch + 64)
    head = LMHead(setting.hidden_size, setting.vocab, device="meta")
    head.weight = torch.nn.Parameter(inputs.weight, requires_grad=False)
    states, calibration = inputs.hidden[:-64], inputs.hidden[-64:]
    batches = torch.split(states, setting.batch)
    screens = []
    for bits in (8, "4+4"):
        progress(f"{where}: copy, {bits} bits")
        screens.append(ScreenedHead(head, bits=bits, calibration=calibration))
    true = _true_tokens(head, states)
    seconds: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    ways = list(_ways(setting, head, screens))
    for way in ways:
        progress(f"{where}: {way.name}, first call")
        tokens = torch.cat([way.step(h) for h in batches])
        wrong = None if setting.sampled and not way.ours else int((tokens != true).sum())
        if setting.sampled and way.ours:
            wrong = int((tokens != _sampled(head, batches)).sum())
        rows.append({"name": way.name, "ours": way.ours, "bytes": way.bytes, "wrong": wrong})
        seconds[way.name] = []
    for number in range(rounds):
        progress(f"{where}: round {number + 1} of {rounds}")
        for way in ways:
            best = math.inf
            for h in batches[:4]:
                begin = time.perf_counter()
                way.step(h)
                best = min(best, time.perf_counter() - begin)
            seconds[way.name].append(best)
    for row in rows:
        row.update(asdict(summary(seconds[row["name"]])))
        row["gb_per_s"] = row["bytes"] / row["best"] / 1e9
    goals = [
        {
            "ours": ours,
            "peer": peer,
            "at_most": most,
            "measured": min(seconds[ours]) / min(seconds[peer]),
            "median": ratio(seconds[ours], seconds[peer]).median,
        }
        for ours, peer, most in setting.goals
        if ours in seconds and peer in seconds
    ]
    certificates = [s.argmax(states).certificate for s in screens]
    return {
        "setting": {"name": setting.name, "vocab": setting.vocab, "batch": setting.batch}
        | {"hidden_size": setting.hidden_size, "sampled": setting.sampled},
        "ways": rows,
        "goals": goals,
        "rescored": [float(c.rows_rescored.double().mean()) for c in certificates],
        "fall_back": [c.fall_back_rate for c in certificates],
        "copy_bytes": [s.nbytes for s in screens],
    }


def _true_tokens(head: Any, states: Tensor) -> Tensor:
    """The argmax by float64, ties to the lowest id: the exact sweep."""
    tokens: Tensor = head(states).argmax(-1)
    return tokens


def _sampled(head: Any, batches: Sequence[Tensor]) -> Tensor:
    """The sampler's tokens from float64 logits."""
    import torch

    from lmhead import Sampler

    sampler = Sampler(seed=0, **_TOP_P)
    weight = head.weight.double()
    return torch.cat([sampler(h.double() @ weight.T).token for h in batches])


def _ways(setting: Setting, head: Any, screens: Sequence[ScreenedHead]) -> list[_Way]:
    import torch

    from lmhead import Sampler

    weight: Tensor = head.weight
    sampler = Sampler(seed=0, **_TOP_P) if setting.sampled else None
    ways = [_screened(screen, sampler) for screen in screens]
    if setting.sampled:
        return [*ways, *_hugging_face(weight)]
    ways.append(_Way("float32", lambda h: (h @ weight.T).argmax(-1), weight.nbytes))
    half = weight.bfloat16()
    ways.append(_Way("bfloat16", lambda h: (h.bfloat16() @ half.T).argmax(-1), half.nbytes))
    packed = getattr(torch, "_weight_int8pack_mm", None)
    if packed is not None:
        scales = weight.abs().amax(1) / 127
        whole = (weight / scales[:, None]).round().to(torch.int8)
        scales16 = scales.bfloat16()
        ways.append(
            _Way("int8", lambda h: packed(h.bfloat16(), whole, scales16).argmax(-1), whole.nbytes)
        )
    return ways


def _screened(screen: ScreenedHead, sampler: Sampler | None) -> _Way:
    import torch

    def step(h: Tensor) -> Tensor:
        return screen.argmax(h).token if sampler is None else screen.sample(h, sampler).token

    some = torch.full((1, screen.head.hidden_size), 1e-3)
    read = screen.argmax(some).certificate.bytes_read
    return _Way(f"screen {screen.bits}", step, read, ours=True)


def _hugging_face(weight: Tensor) -> list[_Way]:
    import torch

    try:
        from transformers.generation import logits_process as hf
    except ImportError:
        return []
    chain = hf.LogitsProcessorList(
        [
            hf.TemperatureLogitsWarper(_TOP_P["temperature"]),
            hf.TopPLogitsWarper(_TOP_P["top_p"]),
        ]
    )

    def step(h: Tensor) -> Tensor:
        ids = torch.zeros(len(h), 1, dtype=torch.int64)
        return torch.multinomial(chain(ids, h @ weight.T).softmax(-1), 1)[:, 0]

    return [_Way("hugging face", step, weight.nbytes)]


def lines(document: Document, width: int) -> list[str]:
    """The tables for the terminal."""
    out = [f"decode: {document['title']}", *conditions(document)]
    if "read_gb_per_s" in document:
        out.append(f"memory is read at {document['read_gb_per_s']:.1f} GB/s")
    for result in (*document["results"], *document["growth"]):
        out += ["", *_block(result, width)]
    out += [
        "",
        f"Best of a few calls per round, median of {document['rounds']} rounds, all in turn. MB:",
        "read of the weight or its copy per pass. wrong: tokens other than those of float64.",
    ]
    return [*out, *(["Interrupted."] if document["interrupted"] else [])]


def _block(result: dict[str, Any], width: int) -> list[str]:
    setting, ways = result["setting"], result["ways"]
    base = next((w for w in ways if w["name"] in ("float32", "hugging face")), ways[-1])
    columns: Columns = [
        ("", [w["name"] for w in ways]),
        ("ms", [f"{1e3 * w['median']:.2f}" for w in ways]),
        (f"of {base['name']}", [f"{w['median'] / base['median']:.3f}" for w in ways]),
        ("MB", [f"{w['bytes'] / 1e6:,.0f}" for w in ways]),
        ("GB/s", [f"{w['gb_per_s']:.1f}" for w in ways]),
        ("wrong", ["" if w["wrong"] is None else str(w["wrong"]) for w in ways]),
    ]
    rescored = ", ".join(f"{r:.1f}" for r in result["rescored"])
    title = (
        f"{setting['name']}: V {setting['vocab']:,}, D {setting['hidden_size']}, batch "
        f"{setting['batch']}; words rescored for an argmax: {rescored}"
    )
    goals = [
        f"  {g['ours']} / {g['peer']}: {g['measured']:.3f} by the best rounds"
        f" ({g['median']:.3f} by their median), goal {g['at_most']:.2f}"
        f" {'met' if g['measured'] <= g['at_most'] else 'NOT met'}"
        for g in result["goals"]
    ]
    return [title, *table(columns, width), *goals]
