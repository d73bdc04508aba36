"""The room itself: every name documented by a formula and an example, and no torch inside."""

import inspect
import subprocess
import sys

import pytest

from lmhead import reference as ref

FUNCTIONS = [name for name in ref.__all__ if inspect.isfunction(getattr(ref, name))]


def test_contents_are_complete_and_unique() -> None:
    assert len(set(ref.__all__)) == len(ref.__all__)
    assert len(FUNCTIONS) > 50
    public = {name for name in vars(ref) if not name.startswith("_")}
    missing = {n for n in public if not inspect.ismodule(getattr(ref, n))} - set(ref.__all__)
    assert not missing


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_a_docstring_with_an_example(name: str) -> None:
    doc = inspect.getdoc(getattr(ref, name))
    assert doc
    assert ">>>" in doc


def test_every_backward_stands_beside_its_forward() -> None:
    for name in FUNCTIONS:
        if not name.endswith("_backward"):
            continue
        backward, forward = getattr(ref, name), getattr(ref, name.removesuffix("_backward"))
        assert backward.__module__ == forward.__module__
        first, second = (inspect.getsourcelines(f)[1] for f in (forward, backward))
        assert first < second


def test_no_torch_inside() -> None:
    code = "import sys, lmhead.reference; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
