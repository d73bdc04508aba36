"""Check the locked dependencies of Python and npm for known vulnerabilities.

    python -m scripts.audit [--offline]

What needs no network: every version is locked, every npm file has a hash and comes from no other
place than the registry, installed packages have the locked versions, no wheel was installed from a
local path or a URL. Then pip-audit (`pip install pip-audit`) and `npm audit` ask their databases.

Exit code: 0 nothing found, 1 something found, 2 a database could not be asked.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INSTALL_SCRIPTS = {"esbuild"}  # npm packages that may run a script when they are installed
OWN = "lmhead"

Versions = dict[str, str]


def normalized(name: str) -> str:
    """Return the name of a Python package as it is compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(path: Path) -> tuple[Versions, list[str]]:
    """Return the exact versions of a constraints file, and its problems."""
    versions: Versions = {}
    problems = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([\w.-]+)==([\w.+!-]+)", text)
        if match is None:
            problems.append(f"{path.name}: must be NAME==VERSION; got {text!r}")
        else:
            versions[normalized(match[1])] = match[2]
    return versions, problems


def installed_versions() -> tuple[Versions, list[str]]:
    """Return the versions of all installed packages, and those from unexpected sources."""
    versions: Versions = {}
    problems = []
    for package in distributions():
        name = normalized(package.metadata["Name"])
        if name == OWN:
            continue
        versions[name] = package.version
        if package.read_text("direct_url.json"):
            problems.append(f"{name} was installed from a path or a URL, not from the index")
    return versions, problems


def check_python(lock: Path, installed: Versions) -> list[str]:
    """Return the problems of the locked Python packages, without a network."""
    locked, problems = locked_versions(lock)
    for name, version in locked.items():
        have = installed.get(name)
        if have is not None and have.partition("+")[0] != version.partition("+")[0]:
            problems.append(f"{name} must have the locked version {version}; {have} is installed")
    return problems


def check_npm(lock: Path) -> list[str]:
    """Return the problems of a package-lock.json, without a network."""
    problems = []
    packages: dict[str, dict[str, Any]] = json.loads(lock.read_text(encoding="utf-8"))["packages"]
    for path, package in packages.items():
        if not path or package.get("link"):
            continue
        name = path.rpartition("node_modules/")[2]
        if not str(package.get("integrity", "")).startswith("sha512-"):
            problems.append(f"{name}: integrity must be a SHA-512 hash")
        source = package.get("resolved", "")
        if source and not re.match(r"https://registry\.", source):
            problems.append(f"{name} must come from the registry; got {source}")
        if package.get("hasInstallScript") and name not in INSTALL_SCRIPTS:
            problems.append(f"{name} runs a script when it is installed")
    return problems


def ask_pip_audit(versions: Versions) -> tuple[list[str], str | None]:
    """Return the known vulnerabilities of Python packages, and why they could not be asked for."""
    program = shutil.which("pip-audit", path=str(Path(sys.executable).parent))
    program = program or shutil.which("pip-audit")
    if program is None:
        return [], "pip-audit is not installed: pip install pip-audit"
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "requirements.txt"
        public = {name: version.partition("+")[0] for name, version in versions.items()}
        listed.write_text("".join(f"{n}=={v}\n" for n, v in sorted(public.items())))
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        done = run([program, *options, "--requirement", str(listed)])
    report = parsed(done.stdout)
    if not isinstance(report.get("dependencies"), list):
        return [], f"pip-audit could not ask its database: {last_line(done.stderr)}"
    found = [
        f"{package['name']} {package['version']}: {flaw['id']}, fixed in "
        f"{', '.join(flaw['fix_versions']) or 'no version'}"
        for package in report["dependencies"]
        for flaw in package.get("vulns", [])
    ]
    skipped = [one["skip_reason"] for one in report["dependencies"] if "skip_reason" in one]
    if skipped:
        count = f"{len(skipped)} of {len(report['dependencies'])} packages"
        return found, f"pip-audit could not ask about {count}: {skipped[0]}"
    return found, None


def ask_npm_audit(folder: Path) -> tuple[list[str], str | None]:
    """Return the known vulnerabilities of npm packages, and why they could not be asked for."""
    done = run([str(folder / "with_node"), "npm", "audit", "--package-lock-only", "--json"], folder)
    report = parsed(done.stdout)
    if "vulnerabilities" not in report:
        reason = report.get("message") or last_line(done.stderr)
        return [], f"npm audit could not ask its database: {reason}"
    return [
        f"{name} {flaw['range']}: {flaw['severity']}"
        for name, flaw in report["vulnerabilities"].items()
    ], None


def run(command: list[str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command and return what it printed."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, cwd=folder, timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def parsed(text: str) -> dict[str, Any]:
    """Return a JSON object; {} if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def main(arguments: list[str] | None = None) -> int:
    """Print what was found; see the exit codes above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--offline", action="store_true", help="ask no database")
    options = parser.parse_args(arguments)
    installed, problems = installed_versions()
    problems += check_python(ROOT / "constraints.txt", installed)
    problems += check_npm(ROOT / "explorer" / "package-lock.json")
    unreachable = []
    if not options.offline:
        for vulnerabilities, reason in (ask_pip_audit(installed), ask_npm_audit(ROOT / "explorer")):
            problems += vulnerabilities
            unreachable += [reason] if reason else []
    for problem in problems:
        print(f"found: {problem}")
    for reason in unreachable:
        print(f"not checked: {reason}", file=sys.stderr)
    asked = "no database was asked" if options.offline else f"{2 - len(unreachable)} of 2 databases"
    print(f"{len(installed)} Python packages; {len(problems)} problems; {asked}")
    return 1 if problems else 2 if unreachable else 0


if __name__ == "__main__":
    sys.exit(main())
