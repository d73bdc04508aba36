"""Which package may import which, and what `import lmhead` and `lmhead --help` must not load."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterator
from graphlib import TopologicalSorter
from itertools import zip_longest
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "lmhead"

# Top to bottom: a package may import those above it, never those below. Names in one tuple are one
# package in several files.
PACKAGES = [
    ("lazy_exports",),
    ("errors",),
    ("html_table",),
    ("sampler_options",),
    ("progress",),
    ("user_cache",),
    ("checks",),
    ("reference",),
    ("scores",),
    ("sweep",),
    ("screen",),
    ("parallel",),
    ("lazy",),
    ("bypass",),
    ("head",),
    ("loss",),
    ("linear_query",),
    ("linear_divergence",),
    ("losses",),
    ("distill",),
    ("tying",),
    ("sampling",),
    ("vocab",),
    ("conformance",),
    ("nn",),
    ("models",),
    ("analysis",),
    ("train",),
    ("integrations",),
    ("explorer",),
    ("server",),
    ("notebook",),
    ("cli",),
    ("__main__",),
]
PLACE = {file: place for place, package in enumerate(PACKAGES) for file in package}
# The textbook is what fast paths are compared with: they must not lean on it. Pages may show it.
MAY_USE_THE_TEXTBOOK = {"reference", "conformance", "cli", "server"}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node: ast.AST) -> Iterator[str]:
    """Every module that the code imports, at its top, in a function, or by `import_module`."""
    for child in ast.iter_child_nodes(node):
        if only_for_types(child):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are written in full"
            yield str(child.module)
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module"):
            name = child.args[0]
            if isinstance(name, ast.JoinedStr):  # f"lmhead.cli.cmd_{name}": the package is known
                name = name.values[0]
            if isinstance(name, ast.Constant):
                yield str(name.value)
        yield from imports(child)


def packages_used(file: Path) -> set[str]:
    names = [name.split(".") for name in imports(ast.parse(file.read_text(encoding="utf-8")))]
    inside = {name[1] for name in names if name[0] == "lmhead" and len(name) > 1}
    return {package for package in inside if package in PLACE}


@pytest.mark.parametrize("file", files(), ids=lambda f: str(f.relative_to(SOURCE)))
def test_imports_point_upwards(file: Path) -> None:
    package = package_of(file)
    if package == "__init__":
        assert packages_used(file) <= {"lazy_exports"}, "public names are imported on first use"
        return
    assert package in PLACE, f"give {package} its place in the order"
    used = packages_used(file)
    below = {other for other in used if PLACE[other] > PLACE[package]}
    assert not below, f"{package} uses {below}, which come after it"
    if package not in MAY_USE_THE_TEXTBOOK:
        assert "reference" not in used


def module_of(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_used(tree: ast.AST, modules: Container[str]) -> Iterator[str]:
    """The modules among those given; `from lmhead.sweep import kernels` is not the package."""
    found = list(imports(tree))
    for name, following in zip_longest(found, found[1:], fillvalue=""):
        package_of_next = following.rpartition(".")[0] == name and following in modules
        if name in modules and not package_of_next:
            yield name


def test_no_import_cycle_not_even_a_hidden_one() -> None:
    modules = {module_of(file): file for file in files()}
    order: TopologicalSorter[str] = TopologicalSorter()
    for module, file in modules.items():
        used = set(modules_used(ast.parse(file.read_text(encoding="utf-8")), modules))
        order.add(module, *(used - {module}))
    order.prepare()  # raises CycleError


def test_a_module_name_occurs_once() -> None:
    names = Counter(file.stem for file in files())
    assert not {name for name, n in names.items() if n > 1} - {"__init__", "__main__"}


def test_the_textbook_needs_no_torch() -> None:
    for file in (SOURCE / "reference").glob("*.py"):
        loaded = {name.split(".")[0] for name in imports(ast.parse(file.read_text()))}
        assert "torch" not in loaded, file


def test_the_parser_sees_imports_inside_functions() -> None:
    tree = ast.parse(
        "import a\nfrom b import c\n"
        "def f():\n    from lmhead.sweep import g\n"
        "if TYPE_CHECKING:\n    import hidden\n"
        "import_module('lmhead.screen')\nimport_module(f'lmhead.cli.cmd_{name}')\n"
    )
    at_once = ["a", "b", "b.c", "lmhead.sweep", "lmhead.sweep.g"]
    assert list(imports(tree)) == [*at_once, "lmhead.screen", "lmhead.cli.cmd_"]


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    code += "\nimport sys\nprint('\\nLOADED', *{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(run.stdout.split("LOADED")[1].split())


def test_import_lmhead_is_light() -> None:
    assert not loaded_by("import lmhead") & {"torch", "numpy", "transformers", "click"}


def test_the_public_names_load_neither_transformers_nor_a_server() -> None:
    loaded = loaded_by("import lmhead\nfor name in lmhead.__all__: getattr(lmhead, name)")
    assert "torch" in loaded
    assert not loaded & {"transformers", "starlette", "uvicorn", "fastapi", "aiohttp"}


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_the_command_line_answers_without_torch(option: str) -> None:
    loaded = loaded_by(
        "from lmhead.cli import main\n"
        f"try: main([{option!r}])\n"
        "except SystemExit as end: assert not end.code"
    )
    assert "click" in loaded
    assert not loaded & {"torch", "numpy", "transformers"}
