"""Every adapter computes the float64 results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import faulty_implementations as faulty
from bench.running import TINY
from benchmarks import loss, query
from benchmarks.float64_reference import errors, expected_results
from benchmarks.inputs import generate
from benchmarks.machine import ROOT
from benchmarks.task import Task, UnavailableError

INPUTS = generate(400, 24, 48)
IN_THIS_PROCESS = [
    (task, name)
    for task in (loss.TASK, query.TASK)
    for name in task.implementations
    if name not in ("compile", "cce")
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("task", "name"), IN_THIS_PROCESS, ids=lambda x: getattr(x, "name", x))
def test_results(task: Task, name: str, dtype: str) -> None:
    inputs = INPUTS.to(dtype)
    try:
        step = task.implementations[name].prepare(inputs.detached())
    except UnavailableError as missing:
        pytest.skip(str(missing))
    right = expected_results(task.name, inputs)
    found = errors(step(), right)
    assert set(found) == (set() if name.startswith("product") else set(task.headings))
    assert task.too_far(name, dtype, found) == []


def test_compiled_implementations(tmp_path: Path) -> None:
    """In another process, since compiling leaves state behind and warns of deprecations."""
    only = ["--only", "compile", "--only", "cce", "--no-plot", "--out", str(tmp_path), "--json"]
    command = [sys.executable, "-m", "benchmarks", "loss", *TINY, *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    document = json.loads(done.stdout)
    for r in document["results"]:
        assert r["wrong"] == [], r["name"]
    for s in document["skipped"]:
        if "not installed" not in s["reason"] and "compiler" not in s["reason"].lower():
            pytest.fail(f"{s['name']}: {s['reason']}")


def test_names_are_known() -> None:
    assert [i.name for i in loss.TASK.pick(("hf", "lmhead"))] == ["lmhead", "hf"]
    assert len(loss.TASK.pick(())) == len(loss.TASK.implementations)
    with pytest.raises(ValueError, match=r"only must name some of lmhead, .*; got 'liger'"):
        loss.TASK.pick(("liger",))


def test_the_filter_has_its_own_tolerance() -> None:
    found = {"loss": 0.0, "hidden_grad": 0.005, "weight_grad": 0.001}
    assert loss.TASK.too_far("lmhead-filter", "float32", found) == []
    assert loss.TASK.too_far("lmhead", "float32", found) == ["hidden_grad", "weight_grad"]
    assert faulty.TASK.too_far("wrong", "float32", {"weight_grad": 0.01}) == ["weight_grad"]


def test_a_product_has_no_results() -> None:
    step = loss.product_reused(INPUTS)
    assert step() == {}
    assert torch.is_tensor(INPUTS.hidden)
