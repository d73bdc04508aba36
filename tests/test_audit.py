"""`scripts/audit.py`: what it finds without a network, and what it says when it has none."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import audit


def test_this_repository_has_no_problem_that_can_be_seen_offline() -> None:
    assert audit.locked_versions(audit.ROOT / "constraints.txt")[1] == []
    assert audit.check_npm(audit.ROOT / "explorer" / "package-lock.json") == []


def test_loose_and_other_versions_are_found(tmp_path: Path) -> None:
    lock = tmp_path / "constraints.txt"
    lock.write_text("numpy==2.0.0  # exact\ntorch>=2\nSome_Package==1.0\n")
    problems = audit.check_python(lock, {"numpy": "2.0.1", "some-package": "1.0+cpu"})
    assert problems == [
        "constraints.txt: must be NAME==VERSION; got 'torch>=2'",
        "numpy must have the locked version 2.0.0; 2.0.1 is installed",
    ]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"integrity": "sha1-abc"}, "integrity must be"),
        ({"resolved": "git+ssh://somewhere/x.git"}, "must come from the registry"),
        ({"hasInstallScript": True}, "runs a script"),
    ],
)
def test_npm_packages_from_elsewhere_are_found(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    lock = tmp_path / "package-lock.json"
    package = {"version": "1", "integrity": "sha512-abc", "resolved": ""}
    lock.write_text(json.dumps({"packages": {"": {}, "node_modules/x": package | changes}}))
    (found,) = audit.check_npm(lock)
    assert found.startswith("x")
    assert problem in found


def test_a_database_that_cannot_be_asked_is_no_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(command: list[str], folder: Path = Path()) -> Any:  # noqa: ARG001
        return subprocess.CompletedProcess(command, 1, "", "no route to host\n")

    monkeypatch.setattr(audit, "run", no_network)
    monkeypatch.setattr(audit, "installed_versions", lambda: ({}, []))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: "pip-audit")
    assert audit.main([]) == 2
    errors = capsys.readouterr().err
    assert "pip-audit could not ask its database: no route to host" in errors
    assert "npm audit could not ask its database" in errors
    assert audit.main(["--offline"]) == 0


def test_vulnerabilities_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    flaw = {"id": "PYSEC-1", "fix_versions": ["2.0"]}
    report: dict[str, list[dict[str, Any]]] = {
        "dependencies": [{"name": "x", "version": "1.0", "vulns": [flaw]}]
    }
    answer = subprocess.CompletedProcess([], 1, json.dumps(report), "")
    monkeypatch.setattr(audit, "run", lambda *_, **__: answer)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: "pip-audit")
    assert audit.ask_pip_audit({"x": "1.0"}) == (["x 1.0: PYSEC-1, fixed in 2.0"], None)
    report["dependencies"].append({"name": "y", "skip_reason": "not found"})
    answer.stdout = json.dumps(report)
    assert audit.ask_pip_audit({"x": "1.0", "y": "1"})[1] == (
        "pip-audit could not ask about 1 of 2 packages: not found"
    )
