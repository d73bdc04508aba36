"""Every adapter computes what the float64 truth says."""

import pytest
import torch

from bench import liars
from lmhead.bench import losses, queries
from lmhead.bench.compare import Settings, compare
from lmhead.bench.generator import generate
from lmhead.bench.shapes import parse_shape
from lmhead.bench.task import Task, UnavailableError
from lmhead.bench.truth import errors, truth_of

INPUTS = generate(400, 24, 48)
IN_THIS_PROCESS = [
    (task, name)
    for task in (losses.TASK, queries.TASK)
    for name in task.implementations
    if name not in ("compile", "cce")
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("task", "name"), IN_THIS_PROCESS, ids=lambda x: getattr(x, "name", x))
def test_results(task: Task, name: str, dtype: str) -> None:
    inputs = INPUTS.to(dtype)
    copies = type(inputs)(
        inputs.hidden.clone(), inputs.weight.clone(), inputs.targets, inputs.origin, inputs.entropy
    )
    try:
        step = task.implementations[name].prepare(copies)
    except UnavailableError as missing:
        pytest.skip(str(missing))
    right = truth_of(task.name, inputs, top_k=queries.TOP_K)
    found = errors(step(), right)
    assert set(found) == (set() if name.startswith("product") else set(task.headings))
    assert task.too_far(name, dtype, found) == []


def test_compiled_ones() -> None:
    """In processes of their own, since compiling leaves a lot behind."""
    names = ("compile", "cce")
    shape = parse_shape("200x16", tokens=24)
    settings = Settings(shape, rounds=1, threads=1, only=names, memory=False)
    document = compare(losses.TASK, settings, lambda _: None)
    for r in document["results"]:
        assert r["wrong"] == [], r["name"]
    for s in document["skipped"]:
        if "not installed" not in s["reason"] and "compiler" not in s["reason"].lower():
            pytest.fail(f"{s['name']}: {s['reason']}")


def test_names_are_known() -> None:
    assert [i.name for i in losses.TASK.pick(("hf", "lmhead"))] == ["lmhead", "hf"]
    assert len(losses.TASK.pick(())) == len(losses.TASK.implementations)
    with pytest.raises(ValueError, match=r"only must name some of lmhead, .*; got 'liger'"):
        losses.TASK.pick(("liger",))


def test_the_filter_has_its_own_tolerance() -> None:
    found = {"loss": 0.0, "hidden_grad": 0.005, "weight_grad": 0.001}
    assert losses.TASK.too_far("lmhead-filter", "float32", found) == []
    assert losses.TASK.too_far("lmhead", "float32", found) == ["hidden_grad", "weight_grad"]
    assert liars.TASK.too_far("wrong", "float32", {"weight_grad": 0.01}) == ["weight_grad"]


def test_products_are_products() -> None:
    step = losses.product_reused(INPUTS)
    assert step() == {}
    assert torch.is_tensor(INPUTS.hidden)
