"""The compiled core as a fixture, and the same steps without it."""

from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import pytest

from lmhead.sweep import kernels

T = TypeVar("T")
Twin = Callable[[Callable[[], T]], T]


@pytest.fixture
def core(served_by: str) -> ModuleType:
    """The compiled core. With LMHEAD_NATIVE=require its absence has failed the import before."""
    if served_by == "torch":
        pytest.skip("these tests are about the compiled core, and --core says torch")
    if kernels.core is None:
        pytest.skip("the compiled core is not installed; LMHEAD_NATIVE=require makes that an error")
    return kernels.core


@pytest.fixture
def without(core: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Twin[T]:
    """Call a function on the torch operations that stand in for the core, which is there."""
    assert kernels.core is core

    def call(function: Callable[[], T]) -> T:
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "core", None)
            return function()

    return call
