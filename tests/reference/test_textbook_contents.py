"""Every name of the textbook is documented by a formula and an example; no torch is loaded."""

import inspect
import subprocess
import sys

import pytest

from lmhead import reference as ref

CHAPTERS = [name for name in sys.modules if name.startswith("lmhead.reference.")]
NAMES = [name for chapter in CHAPTERS for name in sys.modules[chapter].__all__]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(ref, name))]


def test_contents_are_complete_and_unique() -> None:
    assert len(CHAPTERS) == 20
    assert len(set(NAMES)) == len(NAMES)
    assert len(FUNCTIONS) > 50
    public = {name for name in vars(ref) if not name.startswith("_")}
    assert {n for n in public if not inspect.ismodule(getattr(ref, n))} == set(NAMES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_a_docstring_with_an_example(name: str) -> None:
    doc = inspect.getdoc(getattr(ref, name))
    assert doc
    assert ">>>" in doc


def test_every_backward_follows_its_forward() -> None:
    for name in FUNCTIONS:
        if not name.endswith("_backward"):
            continue
        backward, forward = getattr(ref, name), getattr(ref, name.removesuffix("_backward"))
        assert backward.__module__ == forward.__module__
        first, second = (inspect.getsourcelines(f)[1] for f in (forward, backward))
        assert first < second


def test_no_torch_is_loaded() -> None:
    code = "import sys, lmhead.reference; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
