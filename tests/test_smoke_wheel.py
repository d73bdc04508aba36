"""The check of built archives notices what is missing and what does not belong there."""

import importlib.util
import io
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "smoke_wheel.py"
PACKAGE = [
    "lmhead/__init__.py",
    "lmhead/py.typed",
    "lmhead/_native.pyi",
    "lmhead/explorer/dist/index.html",
    "lmhead/explorer/dist/assets/index-1.js",
    "lmhead/explorer/dist/assets/index-1.css",
    "lmhead/models/tiny/model.safetensors",
    "lmhead/models/tiny/tokenizer.json",
]
WHEEL = [*PACKAGE, "lmhead/_native.abi3.so", "lmhead-0.1.0.dist-info/licenses/LICENSE"]
SDIST = [*(f"src/{name}" for name in PACKAGE), "LICENSE", "PKG-INFO", "native/CMakeLists.txt"]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("smoke_wheel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path, wheel: list[str], sdist: list[str]) -> None:
    with zipfile.ZipFile(folder / "lmhead-0.1.0-py3-none-any.whl", "w") as archive:
        for name in wheel:
            archive.writestr(name, "x")
    with tarfile.open(folder / "lmhead-0.1.0.tar.gz", "w:gz") as tar:
        for name in sdist:
            tar.addfile(tarfile.TarInfo(f"lmhead-0.1.0/{name}"), io.BytesIO())


def test_complete_archives_pass(script: Any, tmp_path: Path) -> None:
    build(tmp_path, WHEEL, SDIST)
    assert script.check_archives(tmp_path, native=True).suffix == ".whl"


@pytest.mark.parametrize("index", range(len(WHEEL)))
def test_missing_file_of_the_wheel(script: Any, tmp_path: Path, index: int) -> None:
    build(tmp_path, WHEEL[:index] + WHEEL[index + 1 :], SDIST)
    with pytest.raises(SystemExit, match="whl has no file"):
        script.check_archives(tmp_path, native=True)


def test_sdist_without_page(script: Any, tmp_path: Path) -> None:
    build(tmp_path, WHEEL, [name for name in SDIST if "index.html" not in name])
    with pytest.raises(SystemExit, match="gz has no file"):
        script.check_archives(tmp_path, native=True)


def test_tests_in_the_wheel(script: Any, tmp_path: Path) -> None:
    build(tmp_path, [*WHEEL, "tests/test_head.py"], SDIST)
    with pytest.raises(SystemExit, match="should not have tests"):
        script.check_archives(tmp_path, native=True)


def test_wheel_without_compiled_core(script: Any, tmp_path: Path) -> None:
    build(tmp_path, [name for name in WHEEL if not name.endswith(".so")], SDIST)
    assert script.check_archives(tmp_path, native=False)


def test_two_wheels_are_refused(script: Any, tmp_path: Path) -> None:
    build(tmp_path, WHEEL, SDIST)
    (tmp_path / "other.whl").touch()
    with pytest.raises(SystemExit, match="one wheel and one sdist"):
        script.check_archives(tmp_path, native=True)
