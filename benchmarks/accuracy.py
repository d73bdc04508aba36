"""What the approximate parts leave over, on real hidden states: errors and counts, no times.

filter    relative error (Frobenius norm) of both gradients for three tail masses
screen    tokens that certified decode scores exactly per hidden state; every answer is compared
          with float64
stored    bound on the KL divergence of rounded hidden states, and their size
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lmhead
from benchmarks.inputs import Inputs
from benchmarks.model_inputs import make_inputs
from benchmarks.report import Document, table
from benchmarks.runner import Run, benchmark, integer
from benchmarks.shapes import SHAPES, Shape
from lmhead.screen.quantized_weight import Bits

_TITLE = "Errors of the gradient filter, work of certified decode, bounds of stored states"
_TAILS = (0.01, 0.02, 0.04)
_SCREENS: tuple[tuple[Bits, int], ...] = ((8, 0), (8, 256), ("4+4", 0), ("4+4", 256))
_TOP = 50


def _lines(document: Document, width: int) -> list[str]:
    def counts(entry: dict[str, float]) -> str:
        return f"{entry['mean']:.1f} ({entry['max']:.0f})"

    filters, screens, stored = (document[name] for name in ("filter", "screen", "stored"))
    return [
        f"{document['rows']} rows, {document['origin']}",
        *table(
            [
                ("tail mass", [f"{f['tail_mass']:g}" for f in filters]),
                ("tokens kept", [f"{f['kept']:.1%}" for f in filters]),
                ("hidden gradient", [f"{f['hidden_error']:.2%}" for f in filters]),
                ("weight gradient", [f"{f['weight_error']:.2%}" for f in filters]),
            ],
            width,
        ),
        "",
        *table(
            [
                ("bits", [f"{s['bits']}" for s in screens]),
                ("calibration", [f"{s['calibration']}" for s in screens]),
                ("argmax, mean (max)", [counts(s["argmax"]) for s in screens]),
                (f"top {_TOP}", [counts(s["top_k"]) for s in screens]),
                ("fell back", [f"{s['fell_back']}" for s in screens]),
                ("wrong", [f"{s['wrong']}" for s in screens]),
            ],
            width,
        ),
        "",
        *table(
            [
                ("stored bits", [f"{s['bits']}" for s in stored]),
                ("logits / stored", [f"{s['ratio']:.0f}" for s in stored]),
                ("KL at most", [f"{s['kl_bound']:.4f}" for s in stored]),
            ],
            width,
        ),
    ]


def _gradients(inputs: Inputs, grad_filter: Any) -> tuple[Tensor, Tensor]:
    hidden, weight = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
    loss = lmhead.linear_cross_entropy(hidden, weight, inputs.targets, grad_filter=grad_filter)
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
    return of_hidden, of_weight


def _filter(inputs: Inputs, run: Run) -> list[dict[str, float]]:
    run.progress("Exact gradients ...")
    exact = _gradients(inputs, None)
    rows = []
    for tail_mass in _TAILS:
        run.progress(f"Gradients with a tail mass of {tail_mass:g} ...")
        watched = lmhead.GradFilter(tail_mass, report_every=1)
        pairs = zip(_gradients(inputs, watched), exact, strict=True)
        hidden, weight = (float((ours - want).norm() / want.norm()) for ours, want in pairs)
        kept = sum(r.kept * r.tokens for r in watched.reports)
        rows.append(
            {
                "tail_mass": tail_mass,
                "kept": kept / sum(r.tokens for r in watched.reports),
                "hidden_error": hidden,
                "weight_error": weight,
            }
        )
    return rows


def _screen(inputs: Inputs, run: Run) -> list[dict[str, Any]]:
    head = lmhead.LMHead(inputs.weight.shape[1], inputs.weight.shape[0]).requires_grad_(False)
    head.weight.copy_(inputs.weight)
    parts = torch.split(inputs.hidden, 64)
    truth = [_best(part, inputs.weight) for part in parts]
    rows = []
    for bits, states in _SCREENS:
        run.progress(f"Certified decode with {bits} bits, {states} states of calibration ...")
        calibration = inputs.hidden[:states] if states else None
        screened = lmhead.ScreenedHead(head, bits=bits, calibration=calibration)
        best = [screened.argmax(part) for part in parts]
        top = [screened.topk(part, _TOP) for part in parts]
        wrong = sum(
            int((a.token != want[:, 0]).sum() + (t.indices != want).any(-1).sum())
            for a, t, want in zip(best, top, truth, strict=True)
        )
        certificates = [a.certificate for a in best] + [t.certificate for t in top]
        rows.append(
            {
                "bits": bits,
                "calibration": states,
                "argmax": _counts([answer.certificate.rows_rescored for answer in best]),
                "top_k": _counts([answer.certificate.rows_rescored for answer in top]),
                "fell_back": sum(int(c.fell_back.sum()) for c in certificates),
                "wrong": wrong,
            }
        )
    return rows


def _best(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the best tokens of the float64 logits, (N, _TOP), ties by the lowest id."""
    logits = hidden.double() @ weight.double().T
    return torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :_TOP]


def _counts(parts: list[Tensor]) -> dict[str, float]:
    counts = torch.cat(parts).double()
    return {"mean": float(counts.mean()), "max": float(counts.max())}


def _stored(inputs: Inputs, run: Run) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for bits in (16, 8):
            run.progress(f"Hidden states in {bits} bits ...")
            path = Path(folder) / "teacher.lmhead"
            info = lmhead.distill.save(inputs.hidden, path, head=inputs.weight.half(), bits=bits)
            size = info.bytes - info.head_bytes
            rows.append(
                {
                    "bits": bits,
                    "ratio": info.logits_bytes / size,
                    "kl_bound": info.kl_bound,
                    "head_bytes": info.head_bytes,
                }
            )
    return rows


@benchmark("accuracy", _TITLE, _lines, quick=True)
@integer("--rows", 2048, "Number of rows N.")
def command(run: Run, rows: int) -> None:
    """Measure errors and counts on SmolLM2-135M: filter, certified decode, stored states.

    \b
    Examples:
      lmhead bench accuracy
      lmhead bench accuracy --rows 512 --threads 1
    """
    if run.quick:
        rows = 64
    known = SHAPES["smollm2"]
    inputs = make_inputs(Shape(known.name, known.vocab, known.hidden_size, rows), "float32")
    run.document |= {
        "rows": rows,
        "origin": inputs.origin,
        "filter": _filter(inputs, run),
        "screen": _screen(inputs, run),
        "stored": _stored(inputs, run),
    }
    run.wrong = any(entry["wrong"] for entry in run.document["screen"])
