"""From logits to a token: ours beside Hugging Face's processors and `torch.multinomial`.

Both are given the same logits, of the generator's peaked distributions, in one process, one call
after the other. Before anything is timed, the words that both keep are compared: they must be the
same ones, with the same probabilities.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lmhead.bench import machine
from lmhead.bench.report import Columns, Document, conditions, table
from lmhead.bench.runner import Progress
from lmhead.bench.statistics import ratio, summary

if TYPE_CHECKING:
    from torch import Tensor

VOCAB = 262144
BATCHES = (1, 8)
_HIDDEN = 64  # of the generator; the product is not timed
_TOLERANCE = 1e-5  # of a probability: the peer adds up in float32


@dataclass(frozen=True)
class Case:
    """A chain as both spell it: `Sampler`'s options, and the peer's processors."""

    name: str
    label: str
    options: dict[str, Any]
    processors: tuple[tuple[str, tuple[float, ...]], ...]
    at_most: float  # our time over theirs


_HOT = ("TemperatureLogitsWarper", (0.8,))
CASES = (
    Case(
        "top_p",
        "temperature 0.8, top_p 0.9",
        {"temperature": 0.8, "top_p": 0.9},
        (_HOT, ("TopPLogitsWarper", (0.9,))),
        1 / 20,
    ),
    Case(
        "typical",
        "temperature 0.8, typical_p 0.9",
        {"temperature": 0.8, "typical_p": 0.9},
        (_HOT, ("TypicalLogitsWarper", (0.9,))),
        1 / 20,
    ),
    Case(
        "top_k",
        "temperature 0.8, top_k 50",
        {"temperature": 0.8, "top_k": 50},
        (_HOT, ("TopKLogitsWarper", (50,))),
        1 / 2,
    ),
    Case(
        "min_p",
        "temperature 0.8, min_p 0.05",
        {"temperature": 0.8, "min_p": 0.05},
        (_HOT, ("MinPLogitsWarper", (0.05,))),
        1 / 2,
    ),
    Case("temperature", "temperature 0.8", {"temperature": 0.8}, (_HOT,), math.inf),
)


@dataclass
class _Timed:
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)


def samples(
    progress: Progress, *, vocab: int = VOCAB, rounds: int = 15, threads: int | None = None
) -> Document:
    """Time every case at every batch size.

    Ctrl-C ends the run early; what was measured until then is returned.

    Raises:
        ValueError: transformers is missing.
    """
    import torch

    from lmhead.bench.generator import generate
    from lmhead.sweep import native

    try:
        import transformers  # noqa: F401
    except ImportError:
        raise ValueError("this compares with transformers: pip install 'lmhead[hf]'") from None
    if threads is not None:
        torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = []
    document: Document = {
        "benchmark": "sample",
        "title": "a token from the logits: temperature, cut, draw",
        "vocab": vocab,
        "rounds": rounds,
        "interrupted": False,
        "native": native.core is not None,
        "transformers": machine.version("transformers"),
        **machine.describe(torch.get_num_threads()),
        "results": rows,
    }
    try:
        progress("logits")
        inputs = generate(vocab, _HIDDEN, max(BATCHES))
        logits = inputs.hidden @ inputs.weight.T
        document["entropy"] = inputs.entropy
        for batch in BATCHES:
            for case in CASES:
                progress(f"batch {batch}: {case.label}")
                rows.append(_measure(case, logits[:batch].contiguous(), rounds))
    except KeyboardInterrupt:
        document["interrupted"] = True
    return document


def _measure(case: Case, logits: Tensor, rounds: int) -> dict[str, Any]:
    import torch

    from lmhead import Sampler

    sampler = Sampler(seed=0, **case.options)
    process = _peer(case)

    def theirs() -> None:
        torch.multinomial(process(logits).softmax(-1), 1)

    wrong = _differs(sampler.process(logits), process(logits))
    timed = _Timed()
    for _ in range(rounds + 1):
        for step, into in ((lambda: sampler(logits), timed.ours), (theirs, timed.theirs)):
            begin = time.perf_counter()
            step()
            into.append(time.perf_counter() - begin)
    # The first round warms up.
    found = ratio(timed.ours[1:], timed.theirs[1:])
    return {
        "name": case.name,
        "label": case.label,
        "batch": len(logits),
        "kept": sampler(logits).kept.counts(),
        "ours": asdict(summary(timed.ours[1:])),
        "theirs": asdict(summary(timed.theirs[1:])),
        "ratio": asdict(found),
        "at_most": None if math.isinf(case.at_most) else case.at_most,
        "within": found.median <= case.at_most,
        "wrong": wrong,
    }


def _peer(case: Case) -> Callable[[Tensor], Tensor]:
    import torch
    from transformers.generation import logits_process

    chain = logits_process.LogitsProcessorList(
        [getattr(logits_process, name)(*given) for name, given in case.processors]
    )

    def process(logits: Tensor) -> Tensor:
        made: Tensor = chain(torch.zeros(len(logits), 1, dtype=torch.int64), logits)
        return made

    return process


def _differs(ours: Tensor, theirs: Tensor) -> str | None:
    """What is not the same about two sets of processed logits; None if nothing is."""
    if not bool(((ours > -math.inf) == (theirs > -math.inf)).all()):
        return "not the same words are kept"
    off = float((ours.double().softmax(-1) - theirs.double().softmax(-1)).abs().max())
    return None if off <= _TOLERANCE else f"a probability differs by {off:.1e}"


def lines(document: Document, width: int) -> list[str]:
    """The table for the terminal."""
    rows = document["results"]
    head = [
        f"sample: {document['title']}; V {document['vocab']:,}, float32",
        *conditions(document),
        f"generated distributions, mean entropy {document.get('entropy', math.nan):.2f}; "
        f"beside transformers {document['transformers']} and torch.multinomial",
        "",
    ]
    columns: Columns = [
        ("", [f"batch {r['batch']}: {r['label']}" for r in rows]),
        ("words kept", [_range(r["kept"]) for r in rows]),
        ("lmhead/ms", [f"{1e3 * r['ours']['median']:.2f}" for r in rows]),
        ("Hugging Face/ms", [f"{1e3 * r['theirs']['median']:.2f}" for r in rows]),
        ("ratio", [f"1/{1 / r['ratio']['median']:.1f}" for r in rows]),
        ("goal", ["" if r["at_most"] is None else f"1/{1 / r['at_most']:.0f}" for r in rows]),
        ("within", [_verdict(r) for r in rows]),
    ]
    foot = [
        "",
        f"Medians of {document['rounds']} rounds, in which both took turns; ratio: median of the",
        "ratios within a round. Ours gives log-probabilities and the kept words with the token.",
    ]
    foot += [f"WRONG: batch {r['batch']}, {r['label']}: {r['wrong']}" for r in rows if r["wrong"]]
    foot += ["Interrupted."] if document["interrupted"] else []
    return [*head, *(table(columns, width) if rows else ["Nothing was measured."]), *foot]


def _range(counts: list[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} - {most:,}"


def _verdict(row: dict[str, Any]) -> str:
    if row["wrong"]:
        return "WRONG"
    return "" if row["at_most"] is None else "yes" if row["within"] else "NO"
