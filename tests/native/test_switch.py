"""LMHEAD_NATIVE: off, require, or whatever is there."""

import os
import subprocess
import sys
from functools import cache

import pytest

HIDE = "import sys; sys.modules['lmhead._native'] = None\n"
WORK = """
import sys
import torch, lmhead
from lmhead.sweep import kernels
torch.set_num_threads(1)
torch.manual_seed(0)
hidden, weight = torch.randn(20, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
loss = lmhead.linear_cross_entropy(hidden, weight, torch.arange(20))
loss.backward()
print(f"{loss.item():.5f} {hidden.grad.norm():.5f} {weight.grad.norm():.5f}")
print("torch" if kernels.core is None else "native")
print("loaded" if sys.modules.get("lmhead._native") else "not loaded")
"""


@cache
def process(*, setting: str | None, hidden: bool = False) -> subprocess.CompletedProcess[str]:
    """A fresh process that computes and says which core served it; the core may be hidden."""
    environment = {k: v for k, v in os.environ.items() if k != "LMHEAD_NATIVE"}
    if setting is not None:
        environment["LMHEAD_NATIVE"] = setting
    code = HIDE + WORK if hidden else WORK
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def output_lines(*, setting: str | None, hidden: bool = False) -> list[str]:
    run = process(setting=setting, hidden=hidden)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("setting", [None, "require"])
def test_the_core_serves(setting: str | None) -> None:
    assert output_lines(setting=setting)[1:] == ["native", "loaded"]


def test_off_does_not_even_load_the_core() -> None:
    assert output_lines(setting="off")[1:] == ["torch", "not loaded"]


def test_where_there_is_no_core_torch_serves() -> None:
    assert output_lines(setting=None, hidden=True) == output_lines(setting="off")


def test_where_there_is_no_core_but_it_is_required_the_import_fails() -> None:
    run = process(setting="require", hidden=True)
    assert run.returncode != 0
    assert "ImportError" in run.stderr or "ModuleNotFoundError" in run.stderr


@pytest.mark.usefixtures("core")
def test_both_give_the_same_answers() -> None:
    assert output_lines(setting="require")[0] == output_lines(setting="off")[0]
