"""Lazy exports of a package: each public name is imported on first use.

So `lmhead --help` and `import lmhead` load no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from sys import modules
from typing import Any


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        names: full module name to the public names it defines.

    >>> _, load, _ = lazy_exports(__name__, {"math": ["sqrt"]})
    >>> load("sqrt")(9.0)
    3.0
    >>> load("sqr")
    Traceback (most recent call last):
    ...
    AttributeError: module 'lmhead.lazy_exports' has no attribute 'sqr'
    """
    module_of = {name: module for module, exported in names.items() for name in exported}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(modules[package], name, value)
        return value

    def names_of_package() -> list[str]:
        return sorted({*vars(modules[package]), *module_of})

    return sorted(module_of), load, names_of_package
