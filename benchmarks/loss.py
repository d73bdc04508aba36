"""Cross-entropy of the logits and both gradients: lmhead, and every other way on a CPU.

Each adapter is what a user would write. All compute F.cross_entropy(F.linear(hidden, weight),
targets) and its gradients for hidden and weight.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmhead
from benchmarks.comparison import compare, draw, lines, task_options
from benchmarks.inputs import Inputs
from benchmarks.runner import Run, benchmark
from benchmarks.task import Implementation, Prepare, Results, Step, Task, UnavailableError, by_name

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

TAIL_MASS = 0.02


def _with_gradients(inputs: Inputs, loss: Loss) -> Step:
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()

    def step() -> Results:
        value = loss(hidden, weight, inputs.targets)
        hidden_grad, weight_grad = torch.autograd.grad(value, (hidden, weight))
        return {"loss": value.detach(), "hidden_grad": hidden_grad, "weight_grad": weight_grad}

    return step


def _dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def _eager(inputs: Inputs) -> Step:
    return _with_gradients(inputs, _dense)


def _compiled(inputs: Inputs) -> Step:
    return _with_gradients(inputs, torch.compile(_dense, dynamic=False))


def _torch_chunked(inputs: Inputs) -> Step:
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        raise UnavailableError("this torch has no F.linear_cross_entropy with options (2.13 has)")
    options = nn.LinearCrossEntropyOptions()
    return _with_gradients(inputs, lambda h, w, t: F.linear_cross_entropy(h, w, t, options=options))


def _huggingface(inputs: Inputs) -> Step:
    if importlib.util.find_spec("transformers") is None:
        raise UnavailableError("transformers is not installed (pip install 'lmhead[hf]')")
    causal = import_module("transformers.loss.loss_utils").ForCausalLMLoss
    vocab = inputs.weight.shape[0]

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        value: Tensor = causal(logits, None, vocab, shift_labels=targets)
        return value

    return _with_gradients(inputs, loss)


def _cut_cross_entropy(inputs: Inputs) -> Step:
    spec = importlib.util.find_spec("cut_cross_entropy")
    if spec is None or spec.submodule_search_locations is None:
        raise UnavailableError(
            "cut-cross-entropy is not installed (pip install --no-deps cut-cross-entropy)"
        )
    # Its __init__ imports triton for GPU kernels; the file used here does not need it.
    package = ModuleType("cut_cross_entropy")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["cut_cross_entropy"] = package
    module = import_module("cut_cross_entropy.torch_compile")
    return _with_gradients(inputs, module.torch_compile_linear_cross_entropy)


def _ours(grad_filter: float | None) -> Prepare:
    def prepare(inputs: Inputs) -> Step:
        return _with_gradients(
            inputs,
            lambda h, w, t: lmhead.linear_cross_entropy(
                h, w, t, grad_filter=grad_filter, max_bytes=inputs.max_bytes
            ),
        )

    return prepare


def product(inputs: Inputs) -> Step:
    """Compute the logits only, as a user writes it."""

    def step() -> Results:
        inputs.hidden @ inputs.weight.T
        return {}

    return step


def product_reused(inputs: Inputs) -> Step:
    """Compute the logits only, into reused memory: the rate of a plain product."""
    out = inputs.hidden.new_zeros(inputs.hidden.shape[0], inputs.weight.shape[0])

    def step() -> Results:
        torch.mm(inputs.hidden, inputs.weight.T, out=out)
        return {}

    return step


PRODUCTS = (
    Implementation("product", "hidden @ weight.T", product, work=1),
    Implementation("product-reused", "torch.mm(..., out=)", product_reused, work=1),
)

TASK = Task(
    name="loss",
    title="cross-entropy of the logits and both gradients",
    module=__name__,
    implementations=by_name(
        Implementation("lmhead", "lmhead, exact", _ours(None), ours=True),
        Implementation(
            "lmhead-filter",
            f"lmhead, grad_filter={TAIL_MASS:g}",
            _ours(TAIL_MASS),
            ours=True,
            tolerance={"hidden_grad": 0.03, "weight_grad": 0.03},
        ),
        Implementation("eager", "eager torch", _eager),
        Implementation("compile", "torch.compile", _compiled),
        Implementation("torch-chunked", "F.linear_cross_entropy", _torch_chunked),
        Implementation("cce", "cut-cross-entropy", _cut_cross_entropy, "cut-cross-entropy"),
        Implementation("hf", "HF ForCausalLMLoss", _huggingface, "transformers"),
        *PRODUCTS,
    ),
    products=3,
    baselines=("eager", "compile"),
    tolerance={
        "float32": {"loss": 1e-5, "hidden_grad": 1e-4, "weight_grad": 1e-4},
        "bfloat16": {"loss": 1e-2, "hidden_grad": 0.1, "weight_grad": 0.1},
        "float16": {"loss": 1e-2, "hidden_grad": 0.1, "weight_grad": 0.1},
    },
    headings={"loss": "loss", "hidden_grad": "d hidden", "weight_grad": "d weight"},
)


@benchmark(TASK.name, TASK.title, lines, draw=draw, quick=True)
@task_options(TASK)
def command(run: Run, **options: Any) -> None:
    """Time cross-entropy and both gradients: lmhead, and every other way to get them.

    \b
    Examples:
      lmhead bench loss                            SmolLM2, N = 2048, float32
      lmhead bench loss --dtype bfloat16 --tokens 256
      lmhead bench loss --shape 32000x256 --quick --only lmhead --only eager
    """
    compare(run, TASK, **options)
