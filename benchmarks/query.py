"""Five queries at once: log_prob and rank of the target, entropy, argmax, the 20 largest logits.

lmhead takes one sweep; the peers are the lines of torch that compute the same from the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lmhead
from benchmarks.comparison import compare, draw, lines, task_options
from benchmarks.float64_reference import TOP_K
from benchmarks.inputs import Inputs
from benchmarks.loss import PRODUCTS
from benchmarks.runner import Run, benchmark
from benchmarks.task import Implementation, Results, Step, Task, by_name


def _dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Results:
    z = F.linear(hidden, weight).float()
    log_p = z.log_softmax(-1)
    ids = targets[:, None]
    return {
        "log_prob": log_p.gather(-1, ids)[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "rank": (z > z.gather(-1, ids)).sum(-1),
        "argmax": z.argmax(-1),
        "top_k": z.topk(TOP_K).indices,
    }


def _eager(inputs: Inputs) -> Step:
    return lambda: _dense(inputs.hidden, inputs.weight, inputs.targets)


def _compiled(inputs: Inputs) -> Step:
    compiled = torch.compile(_dense, dynamic=False)
    return lambda: compiled(inputs.hidden, inputs.weight, inputs.targets)


def _ours(inputs: Inputs) -> Step:
    def step() -> Results:
        answers = lmhead.query(
            inputs.hidden,
            inputs.weight,
            log_prob=inputs.targets,
            rank=inputs.targets,
            entropy=True,
            argmax=True,
            top_k=TOP_K,
            max_bytes=inputs.max_bytes,
        )
        assert answers.log_prob is not None
        assert answers.rank is not None
        assert answers.entropy is not None
        assert answers.argmax is not None
        assert answers.top_k is not None
        return {
            "log_prob": answers.log_prob,
            "entropy": answers.entropy,
            "rank": answers.rank,
            "argmax": answers.argmax,
            "top_k": answers.top_k.indices,
        }

    return step


# Half precision rounds the logits of the dense peers: many of them tie, and the ids are arbitrary.
# Their errors are printed; only lmhead's must be 0.
_ANY = {"rank": 1.0, "argmax": 1.0, "top_k": 1.0}
_NONE = {"rank": 0.0, "argmax": 0.0, "top_k": 0.0}

TASK = Task(
    name="query",
    title=f"log_prob, entropy, rank, argmax and top_k={TOP_K} together",
    module=__name__,
    implementations=by_name(
        Implementation("lmhead", "lmhead.query", _ours, ours=True, tolerance=_NONE),
        Implementation("eager", "eager torch", _eager),
        Implementation("compile", "torch.compile", _compiled),
        *PRODUCTS,
    ),
    products=1,
    baselines=("product", "eager"),
    tolerance={
        "float32": {"log_prob": 1e-4, "entropy": 1e-4, "rank": 0.05, "argmax": 0.01, "top_k": 0.05},
        "bfloat16": {"log_prob": 0.05, "entropy": 0.05, **_ANY},
        "float16": {"log_prob": 0.05, "entropy": 0.05, **_ANY},
    },
    headings={name: name for name in ("log_prob", "entropy", "rank", "argmax", "top_k")},
)


@benchmark(TASK.name, TASK.title, lines, draw=draw, quick=True)
@task_options(TASK)
def command(run: Run, **options: Any) -> None:
    """Time log-probability, entropy, rank, argmax and top 20 at once.

    \b
    Examples:
      lmhead bench query
      lmhead bench query --shape gemma-3-270m --rounds 3
    """
    compare(run, TASK, **options)
