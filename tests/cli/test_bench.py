"""`lmhead bench`: runs the benchmarks of the clone, and says so where there is none."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lmhead.cli import cmd_bench as bench
from lmhead.cli import main


def test_it_runs_the_benchmarks_of_the_clone(tmp_path: Path) -> None:
    tiny = ["loss", "--shape", "200x16", "--tokens", "24", "--quick", "--only", "product"]
    done = CliRunner().invoke(
        main, ["bench", *tiny, "--threads", "1", "--no-plot", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    assert "hidden @ weight.T" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["loss-200x16-24-float32-quick.json"]


def test_its_help_loads_no_torch() -> None:
    code = "import sys\nfrom lmhead.cli import main\ntry: main(['bench', '--help'])\n"
    code += "except SystemExit: print('TORCH' if 'torch' in sys.modules else 'LIGHT')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "train-speed" in done.stdout
    assert done.stdout.endswith("LIGHT\n")


@pytest.mark.parametrize("arguments", [(), ("loss", "--shape", "gpt2"), ("--help",)])
def test_without_a_clone_it_says_so(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "python" / "site-packages" / "lmhead" / "cli" / "cmd_bench.py"
    monkeypatch.setattr(bench, "__file__", str(installed))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "command", bench.load_command())
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code == 2
    assert done.output == (
        "Error: lmhead bench needs a clone of the repository: run it there, or pip install "
        "--editable it\n"
    )


def test_a_clone_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(bench.__file__).resolve().parents[3]
    monkeypatch.setattr(bench, "__file__", str(tmp_path / "a" / "b" / "lmhead" / "cmd_bench.py"))
    monkeypatch.chdir(root)
    assert bench.find_clone() == root
