"""One token from a hidden state: certified decode compared with full products.

All methods have the same head and the same hidden states, in one process, one call after the other.
Before anything is timed, tokens are compared: lmhead's must be those of float64; the errors of the
others are shown. `bytes` is what is read of the weight, or of its copy, for one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.inputs import generate
from benchmarks.plots import OURS, PEERS, Figure, bars, label, new_figure
from benchmarks.report import Columns, Document
from benchmarks.runner import Run, benchmark, rounds
from benchmarks.sample import huggingface_process
from benchmarks.timing import Progress, best_of_four, one_call, ratio, summary, time_calls
from lmhead import LMHead, Sampler
from lmhead.screen import ScreenedHead

STATES = 8  # number of distinct batches of hidden states
GROWTH: tuple[int, ...] = (16384, 65536, 262144, 1048576)
_GROWTH_HIDDEN = 512
_TOP_P: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}


@dataclass(frozen=True)
class Setting:
    """A head, a batch size, and whether tokens are sampled with top-p.

    Attributes:
        goals: (ours, peer, largest ratio of our time to the peer's).
    """

    name: str
    vocab: int
    hidden_size: int
    batch: int = 1
    sampled: bool = False
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
            ("screen 4+4", "screen 8", 0.65),
            ("screen 8", "read", 1 / 0.85),
        ),
    ),
    Setting("top-p", 262144, 640, sampled=True, goals=(("screen 8", "hugging face", 0.12),)),
    Setting("batch of 8", 262144, 640, batch=8, goals=(("screen 8", "float32", 0.2),)),
)


@dataclass(frozen=True)
class Method:
    """One way to get the tokens: hidden (B, D) to ids (B,); `read` gives none."""

    name: str
    step: Callable[[Tensor], Tensor]
    bytes: int
    ours: bool = False
    tokens: bool = True


def read_rate() -> float:
    """Return the GB/s at which all threads read memory: the best of five sums of 512 MiB."""
    block = torch.ones(2**27, dtype=torch.float32)
    return block.nbytes / min(one_call(block.sum) for _ in range(5)) / 1e9


def _measure_setting(setting: Setting, rounds: int, progress: Progress) -> dict[str, Any]:
    label = f"{setting.name}, {setting.vocab:,} x {setting.hidden_size}"
    progress(f"{label}: head")
    inputs = generate(setting.vocab, setting.hidden_size, STATES * setting.batch + 64)
    head = LMHead(setting.hidden_size, setting.vocab, device="meta")
    head.weight = torch.nn.Parameter(inputs.weight, requires_grad=False)
    states, calibration = inputs.hidden[:-64], inputs.hidden[-64:]
    batches = torch.split(states, setting.batch)
    screens = []
    for bits in (8, "4+4"):
        progress(f"{label}: copy, {bits} bits")
        screens.append(ScreenedHead(head, bits=bits, calibration=calibration))
    methods = _methods(setting, head.weight, screens)
    expected = _expected_tokens(setting, head, batches)
    rows: list[dict[str, Any]] = []
    for method in methods:
        progress(f"{label}: {method.name}, first call")
        tokens = [method.step(h) for h in batches]
        # Other samplers draw other tokens.
        compared = method.tokens and (method.ours or not setting.sampled)
        wrong = int((torch.cat(tokens) != expected).sum()) if compared else None
        rows.append(
            {"name": method.name, "ours": method.ours, "bytes": method.bytes, "wrong": wrong}
        )
    calls = {m.name: _in_turn(m.step, batches[:4]) for m in methods}
    seconds = time_calls(
        calls, rounds, lambda text: progress(f"{label}: {text}"), clock=best_of_four
    )
    for row in rows:
        row |= asdict(summary(seconds[row["name"]]))
        row["gb_per_s"] = row["bytes"] / row["best"] / 1e9
    goals = [
        {
            "ours": ours,
            "peer": peer,
            "at_most": limit,
            "measured": min(seconds[ours]) / min(seconds[peer]),
            "median": ratio(seconds[ours], seconds[peer]).median,
        }
        for ours, peer, limit in setting.goals
        if ours in seconds and peer in seconds
    ]
    certificates = [s.argmax(states).certificate for s in screens]
    fields = asdict(setting)
    del fields["goals"]
    return {
        "setting": fields,
        "ways": rows,
        "goals": goals,
        "rescored": [float(c.rows_rescored.double().mean()) for c in certificates],
        "fall_back": [c.fall_back_rate for c in certificates],
        "copy_bytes": [s.nbytes for s in screens],
    }


def _in_turn(step: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> Callable[[], Tensor]:
    states = cycle(batches)
    return lambda: step(next(states))


def _expected_tokens(setting: Setting, head: LMHead, batches: Sequence[Tensor]) -> Tensor:
    """Return the tokens of float64 logits; ties go to the lowest id."""
    if not setting.sampled:
        tokens: Tensor = head(torch.cat(list(batches))).argmax(-1)  # the exact sweep
        return tokens
    sampler, weight = Sampler(seed=0, **_TOP_P), head.weight.double()
    return torch.cat([sampler(h.double() @ weight.T).token for h in batches])


def _methods(setting: Setting, weight: Tensor, screens: Sequence[ScreenedHead]) -> list[Method]:
    sampler = Sampler(seed=0, **_TOP_P) if setting.sampled else None
    methods = [_screened(screen, sampler) for screen in screens]
    if setting.sampled:
        return [*methods, *_huggingface(weight)]
    if (codes := screens[0].copy.whole) is not None and setting.batch == 1:
        plain = codes.view(torch.int64)
        methods.append(Method("read", lambda _: plain.sum(), codes.nbytes, tokens=False))
    methods.append(Method("float32", lambda h: (h @ weight.T).argmax(-1), weight.nbytes))
    half = weight.bfloat16()
    methods.append(Method("bfloat16", lambda h: (h.bfloat16() @ half.T).argmax(-1), half.nbytes))
    product = getattr(torch, "_weight_int8pack_mm", None)
    if product is not None:
        scales = weight.abs().amax(1) / 127
        packed, scales16 = (weight / scales[:, None]).round().to(torch.int8), scales.bfloat16()
        step = lambda h: product(h.bfloat16(), packed, scales16).argmax(-1)  # noqa: E731
        methods.append(Method("int8", step, packed.nbytes))
    return methods


def _screened(screen: ScreenedHead, sampler: Sampler | None) -> Method:
    def step(h: Tensor) -> Tensor:
        return screen.argmax(h).token if sampler is None else screen.sample(h, sampler).token

    example = torch.full((1, screen.head.hidden_size), 1e-3)
    read = screen.argmax(example).certificate.bytes_read
    return Method(f"screen {screen.bits}", step, read, ours=True)


def _huggingface(weight: Tensor) -> list[Method]:
    if find_spec("transformers") is None:
        return []
    process = huggingface_process("TopPLogitsWarper", _TOP_P["top_p"])

    def step(h: Tensor) -> Tensor:
        return torch.multinomial(process(h @ weight.T).softmax(-1), 1)[:, 0]

    return [Method("hugging face", step, weight.nbytes)]


def lines(document: Document, width: int) -> list[str]:
    """Return a table per setting."""
    out = [f"memory is read at {document.get('read_gb_per_s', math.nan):.1f} GB/s", ""]
    for result in (*document["results"], *document["growth"]):
        out += [*_block(result, width), ""]
    return [
        *out,
        f"Best of four calls per round, median of {document['rounds']} interleaved rounds.",
        "read: a plain sum of the bytes of the 8-bit copy, as 64-bit numbers.",
        "MB: read of the weight or its copy. wrong: number of tokens that differ from float64's.",
    ]


def _block(result: dict[str, Any], width: int) -> list[str]:
    setting, rows = result["setting"], result["ways"]
    base = next((r for r in rows if r["name"] in ("float32", "hugging face")), rows[-1])
    columns: Columns = [
        ("", [r["name"] for r in rows]),
        ("ms", [f"{1e3 * r['median']:.2f}" for r in rows]),
        (f"of {base['name']}", [f"{r['median'] / base['median']:.3f}" for r in rows]),
        ("MB", [f"{r['bytes'] / 1e6:,.0f}" for r in rows]),
        ("GB/s", [f"{r['gb_per_s']:.1f}" for r in rows]),
        ("wrong", ["" if r["wrong"] is None else str(r["wrong"]) for r in rows]),
    ]
    rescored = ", ".join(f"{r:.1f}" for r in result["rescored"])
    title = (
        f"{setting['name']}: V {setting['vocab']:,}, D {setting['hidden_size']}, batch "
        f"{setting['batch']}; tokens rescored for an argmax: {rescored}"
    )
    goals = [
        f"  {g['ours']} / {g['peer']}: {g['measured']:.3f} by the best rounds"
        f" ({g['median']:.3f} by their median), goal {g['at_most']:.2f}"
        f" {'met' if g['measured'] <= g['at_most'] else 'NOT met'}"
        for g in result["goals"]
    ]
    return [title, *report.table(columns, width), *goals]


def draw(document: Document) -> Figure:
    """Draw the time against the vocabulary, and the times of each setting."""
    figure, (ax, times) = new_figure(document, 2, 4.0)
    colors = {"screen 8": OURS, "screen 4+4": "#14b8a6", "float32": PEERS}
    series: dict[str, list[tuple[int, float]]] = {}
    for result in document["growth"]:
        for row in result["ways"]:
            point = (result["setting"]["vocab"], 1e3 * row["median"])
            series.setdefault(row["name"], []).append(point)
    for name, points in series.items():
        style = "o-" if name.startswith("screen") else "s--"
        ax.loglog(*zip(*points, strict=True), style, color=colors.get(name), label=name)
    ax.set_xscale("log", base=2)
    x = f"vocabulary (D = {document['growth_hidden_size']})"
    label(ax, x=x, y="milliseconds per token", legend=bool(series))
    shown = [
        (f"{result['setting']['name']}: {row['name']}", 1e3 * row["median"], row["ours"])
        for result in document["results"]
        for row in result["ways"]
    ]
    bars(times, [(text, ms, f"{ms:.1f} ms", OURS if ours else PEERS) for text, ms, ours in shown])
    times.tick_params(axis="y", labelsize=6)
    return figure


@benchmark("decode", "a token from a hidden state", lines, draw=draw, quick=True)
@rounds(7)
def command(run: Run, rounds: int) -> None:
    """Time one token from a hidden state: certified decode compared with full products.

    \b
    Examples:
      lmhead bench decode                 several GB of memory, a few minutes
      lmhead bench decode --quick
    """
    settings, growth = SETTINGS, GROWTH
    if run.quick:
        settings = tuple(replace(s, vocab=8192, hidden_size=128, goals=()) for s in settings)
        growth, rounds = (2048, 8192), min(rounds, 2)
    results: list[dict[str, Any]] = []
    series: list[dict[str, Any]] = []
    run.document |= {"rounds": rounds, "results": results, "growth": series}
    run.document["growth_hidden_size"] = _GROWTH_HIDDEN
    run.progress("reading memory")
    run.document["read_gb_per_s"] = read_rate()
    results.extend(_measure_setting(setting, rounds, run.progress) for setting in settings)
    for vocab in growth:
        setting = Setting(f"V = {vocab:,}", vocab, _GROWTH_HIDDEN)
        series.append(_measure_setting(setting, max(3, rounds // 2), run.progress))
    rows = [row for result in (*results, *series) for row in result["ways"]]
    run.wrong = any(row["ours"] and row["wrong"] for row in rows)
