"""Check a built sdist and wheel, then use the wheel in an empty virtual environment.

    python scripts/smoke_wheel.py [dist]     the folder that `python -m build` filled

1. Both archives have the web page, the bundled model, types and license, and nothing of the tests'.
2. A virtual environment in a temporary folder gets the wheel and its dependencies, no extra:
   import, head, loss, sampler, `lmhead next tiny`, `lmhead doctor`; `explore` names its extra.
3. With the extra `explore`, `lmhead explore tiny` serves its page, and all that the page loads; in
   Chromium the page shows the prediction of the installed model. Playwright is that of the Python
   that runs this script. Without a browser this step is left out, but not in CI.
4. Without a C++ compiler the sdist gives a wheel without compiled core, and says so.

Needs the package index, and nothing else of the network. constraints.txt fixes the versions; for
a Python that some of them do not support, `--constraint` names another file.
`--no-native` accepts a wheel without the compiled core; then the core must be reported as missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")

NEEDED = [
    r"lmhead/__init__\.py",
    r"lmhead/py\.typed",
    r"lmhead/_native\.pyi",
    r"lmhead/explorer/dist/index\.html",
    r"lmhead/explorer/dist/assets/index-.+\.js",
    r"lmhead/explorer/dist/assets/index-.+\.css",
    r"lmhead/models/tiny/model\.safetensors",
    r"lmhead/models/tiny/tokenizer\.json",
]
NATIVE = r"lmhead/_native\..*(so|pyd)"
IN_WHEEL = [*NEEDED, r"lmhead-.+\.dist-info/licenses/LICENSE"]
IN_SDIST = [*(rf"lmhead-[^/]+/src/{name}" for name in NEEDED), r"lmhead-[^/]+/LICENSE",
            r"lmhead-[^/]+/native/CMakeLists\.txt", r"lmhead-[^/]+/PKG-INFO"]  # fmt: skip
NOT_IN_WHEEL = r"tests/|benchmarks/|node_modules/|\.(cpp|hpp|ts|tsx)$|__pycache__"
NOT_IN_SDIST = r"/node_modules/|/\.venv/|/__pycache__/|\.so$"


def check_names(archive: Path, names: list[str], needed: list[str], unwanted: str) -> None:
    """Raise SystemExit if an archive lacks a file, or has one that does not belong there."""
    for pattern in needed:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise SystemExit(f"{archive.name} has no file {pattern}")
    for name in names:
        if re.search(unwanted, name):
            raise SystemExit(f"{archive.name} should not have {name}")


def check_archives(folder: Path, native: bool) -> Path:
    """Check the contents of both archives; return the path of the wheel."""
    wheels, sdists = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        found = ", ".join(path.name for path in (*wheels, *sdists)) or "nothing"
        raise SystemExit(f"{folder} must have one wheel and one sdist; it has {found}")
    with tarfile.open(sdists[0]) as archive:
        names = [member.name for member in archive if member.isfile()]
    check_names(sdists[0], names, IN_SDIST, NOT_IN_SDIST)
    names = zipfile.ZipFile(wheels[0]).namelist()
    check_names(wheels[0], names, IN_WHEEL + [NATIVE] * native, NOT_IN_WHEEL)
    return wheels[0]


def use(wheel: Path, sdist: Path, native: bool, constraints: Path) -> None:
    """Install the wheel into a new environment and use it there, far from the clone."""
    with tempfile.TemporaryDirectory(prefix="lmhead-smoke-") as folder:
        home = Path(folder)
        venv.create(home / "env", with_pip=True)
        bin = home / "env" / ("Scripts" if os.name == "nt" else "bin")
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LMHEAD"))}
        env = {**keep, "LMHEAD_NATIVE": "require" if native else "off", "NO_COLOR": "1"}

        def run(*command: str | Path, code: int = 0) -> str:
            done = subprocess.run(
                [str(part) for part in command], cwd=home, env=env, text=True, encoding="utf-8",
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
            if done.returncode != code:
                raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stdout}")
            return done.stdout

        def install(what: str) -> None:
            run(bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                "--constraint", constraints, what)  # fmt: skip

        install(str(wheel))
        print(run(bin / "python", Path(__file__).resolve(), "--inside").strip())
        if "lmhead" not in run(bin / "lmhead", "--version"):
            raise SystemExit("lmhead --version does not print the name")
        expect(run(bin / "lmhead", "next", "tiny", "I love"), r"me +\d+ +\d\.\d+ +0\.\d+")
        best = json.loads(run(bin / "lmhead", "next", "tiny", "I love", "--json"))["tokens"][0][
            "id"
        ]
        expect(run(bin / "lmhead", "doctor"), r"core +native" if native else r"core +torch")
        expect(run(bin / "lmhead", "explore", "tiny", "--no-browser", code=1), r"lmhead\[explore\]")
        print("commands: next, doctor, and explore names its extra")

        install(f"{wheel}[explore]")
        serve = [str(bin / "lmhead"), "explore", "tiny", "--no-browser"]
        with subprocess.Popen(
            serve, cwd=home, env=env, stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                line = server.stdout.readline() if server.stdout else ""
                address = expect(line, r"https?://[^ ]+").rstrip()
                print(f"explore: {check_page(address)} files; {show_page(address, best)}")
            finally:
                server.terminate()

        pure = build_fallback(sdist, home / "pure", constraints)
        run(bin / "python", "-m", "pip", "install", "--no-deps", "--force-reinstall", pure)
        del env["LMHEAD_NATIVE"]
        expect(run(bin / "lmhead", "doctor"), r"core +torch operations \(fallback\)")
        print(f"{pure.name} of the sdist without a compiler: works, and says what is missing")


def build_fallback(sdist: Path, folder: Path, constraints: Path) -> Path:
    """Build the sdist where no compiler works, which must be reported; return the wheel."""
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LMHEAD"))}
    without = {**keep, "CC": "false", "CXX": "false"}
    without["PIP_CONSTRAINT"] = str(constraints)
    made = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--wheel-dir", str(folder),
         str(sdist)],
        env=without, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if made.returncode:
        raise SystemExit(f"without a compiler the sdist cannot be built:\n{made.stdout}")
    expect(made.stdout, "built without its compiled core")
    (wheel,) = folder.glob("*.whl")
    expect(wheel.name, r"-py3-none-any\.whl$")
    return wheel


def expect(text: str, pattern: str) -> str:
    """Return what matches the pattern; raise SystemExit if nothing does."""
    found = re.search(pattern, text)
    if not found:
        raise SystemExit(f"expected {pattern!r} in:\n{text}")
    return found[0]


def check_page(address: str) -> int:
    """Load the page, all files that it names, and the list of models; return how many."""
    base = re.match(r"https?://[^/]+", address)
    assert base
    names = ["/", *re.findall(r'(?:src|href)="(/[^"]+)"', _load(base[0] + "/"))]
    for name in names:
        if not _load(base[0] + name):
            raise SystemExit(f"{name} is empty")
    if len(names) < 4:
        raise SystemExit(f"the page names only {names}")
    return len(names)


def show_page(address: str, best: int) -> str:
    """Open the page in Chromium, where `best` must be the first token; say what was seen."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        found = None
    if found is None:
        if os.environ.get("CI"):
            raise SystemExit("no Chromium here, or no playwright in this Python")
        return "no Chromium here, so the page was not shown"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(locale="en-US")
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(re.sub(r"/(\?.*)?$", "/next?prompt=I%20love", address))
        row = page.locator('[data-chart="ranked"] tbody tr').first
        row.wait_for(timeout=60_000)
        shown = row.get_attribute("data-id")
        browser.close()
    if errors or shown != str(best):
        raise SystemExit(f"the page shows token {shown}, not {best}; its errors: {errors}")
    return f"Chromium shows the next tokens of tiny, {best} first"


def _load(address: str) -> str:
    with urllib.request.urlopen(address, timeout=60) as answer:  # an error status raises
        text: str = answer.read().decode("utf-8")
    return text


def inside() -> None:
    """Use the installed package: runs in the new environment."""
    import torch
    import torch.nn.functional as F

    import lmhead

    if ROOT in Path(lmhead.__file__).resolve().parents:
        raise SystemExit(f"lmhead is imported from the clone: {lmhead.__file__}")
    random = torch.Generator().manual_seed(0)
    head = lmhead.LMHead(16, 1000)
    hidden = torch.randn(32, 16, generator=random, requires_grad=True)
    targets = torch.randint(1000, (32,), generator=random)
    dense = hidden @ head.weight.T
    loss, plain = F.cross_entropy(head(hidden), targets), F.cross_entropy(dense, targets)
    torch.testing.assert_close(loss, plain)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (hidden, head.weight)),
        torch.autograd.grad(plain, (hidden, head.weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(head(hidden).argmax(-1), dense.argmax(-1))
    token = lmhead.Sampler(temperature=0.8, top_p=0.9, seed=0)(head(hidden[:2]).detach()).token
    assert token.shape == (2,)
    text = lmhead.generate(lmhead.open_model("tiny"), "I love", max_new_tokens=5).text
    assert text
    print(f"lmhead {lmhead.__version__} on torch {torch.__version__}: loss, sampler, {text!r}")


def main() -> None:
    """Check what is in the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--no-native", action="store_true", help="a wheel without compiled core")
    parser.add_argument(
        "--constraint", type=Path, default=ROOT / "constraints.txt", help="versions to install"
    )
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside()
        return
    wheel = check_archives(given.folder.resolve(), not given.no_native)
    print(f"{wheel.name}: contents as expected")
    sdist = next(given.folder.resolve().glob("*.tar.gz"))
    use(wheel, sdist, not given.no_native, given.constraint.resolve())


if __name__ == "__main__":
    sys.exit(main())
