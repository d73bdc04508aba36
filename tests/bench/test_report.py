"""Tables, files and plots of a document made by hand, and the CPU family."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import comparison, machine, report, runner
from benchmarks.plots import save_figure


def entry(name: str, label: str, seconds: list[float], **more: Any) -> dict[str, Any]:
    middle = sorted(seconds)[len(seconds) // 2]
    return {
        "name": name,
        "label": label,
        "ours": name.startswith("lmhead"),
        "seconds": seconds,
        "best": min(seconds),
        "median": middle,
        "spread": 0.1,
        "ratios": {},
        "gflops": 50.0,
        "of_product": 0.5,
        "errors": {"loss": 1e-7, "hidden_grad": 2e-6},
        "wrong": [],
        "memory": {"first": 2**27, "later": 2**26, "results": 2**25, "temporary": 2**25},
        **more,
    }


def made() -> dict[str, Any]:
    ratio = {"best": 0.5, "median": 0.61234567, "spread": 0.02}
    return {
        "benchmark": "loss",
        "title": "a task",
        "data": {"origin": "by hand", "entropy": 2.95, "loss": 3.1},
        "shape": {"name": "200x16", "vocab": 200, "hidden_size": 16, "tokens": 24},
        "dtype": "float32",
        "rounds": 3,
        "interrupted": False,
        "native": True,
        **machine.describe(2),
        "product_gflops": 100.0,
        "headings": {"loss": "loss", "hidden_grad": "d hidden"},
        "baselines": ["eager"],
        "results": [
            entry("lmhead", "lmhead, exact", [0.6, 0.7, 0.8], ratios={"eager": ratio}),
            entry("eager", "eager torch", [1.0, 1.1, 1.2], wrong=["hidden_grad"]),
        ],
        "skipped": [{"name": "cce", "label": "cce", "reason": "not installed", "failed": False}],
    }


def test_the_table() -> None:
    text = "\n".join(report.full_text(made(), comparison.lines, 1000))
    assert "200x16: V 200, D 16, N 24, float32; by hand, entropy 2.950, loss 3.1000" in text
    (ours,) = [line for line in text.splitlines() if line.startswith("lmhead, exact")]
    cells = " ".join(ours.split()[2:])
    assert cells == "0.700 0.600 14.3% 0.61 ±0.02 50.0 50% 64 1.0e-07 2.0e-06"
    assert "2.0e-06!" in text
    assert "WRONG: eager torch: hidden_grad" in text
    assert "Skipped: cce: not installed" in text


def test_a_narrow_terminal_gets_several_blocks_of_columns() -> None:
    lines = report.full_text(made(), comparison.lines, 60)
    assert max(map(len, lines[4:12])) <= 60
    assert sum(line.startswith("lmhead, exact") for line in lines) > 1


def test_short_times_are_in_milliseconds() -> None:
    document = made()
    document["results"] = [entry("eager", "eager torch", [0.001, 0.002])]
    assert "time/ms" in "\n".join(comparison.lines(document, 1000))


def test_nothing_measured() -> None:
    document = {**made(), "results": [], "interrupted": True}
    text = "\n".join(comparison.lines(document, 1000))
    assert "Nothing was measured." in text
    assert "Rounds done: 0 of 3." in text


def test_json_has_six_digits(tmp_path: Path) -> None:
    report.write_json(made(), tmp_path / "deep" / "x.json")
    read = json.loads((tmp_path / "deep" / "x.json").read_text(encoding="utf-8"))
    assert read["results"][0]["ratios"]["eager"]["median"] == 0.612346


def test_plots_are_written_and_repeat(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    document = made()
    png, svg = save_figure(comparison.draw(document), tmp_path / "a")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text(encoding="utf-8")
    assert "lmhead, exact" in text
    save_figure(comparison.draw(document), tmp_path / "b")
    assert (tmp_path / "b.svg").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("vendor", "system", "vectors", "family"),
    [
        ("AuthenticAMD", "x86_64", "AVX2", "amd-avx2"),
        ("AuthenticAMD 25", "x86_64", "AVX512", "amd-avx512"),
        ("AuthenticAMD 26", "x86_64", "AVX512", "amd-avx512-zen5"),
        ("GenuineIntel", "x86_64", "AVX512", "intel-avx512"),
        ("GenuineIntel", "x86_64", "AVX512 AMX", "intel-amx"),
        ("GenuineIntel", "x86_64", "DEFAULT", "intel-sse"),
        ("", "aarch64", "DEFAULT", "arm-neon"),
        ("", "riscv64", "DEFAULT", "other-sse"),
    ],
)
def test_the_cpu_family_names_the_folder_of_results(
    vendor: str,
    system: str,
    vectors: str,
    family: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, _, number = vendor.partition(" ")
    cpuinfo = {"vendor_id": name, "cpu family": number}
    monkeypatch.setattr(machine, "_cpuinfo", lambda key: cpuinfo[key])
    monkeypatch.setattr("platform.machine", lambda: system)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: vectors.split()[0])
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: "AMX" in vectors)
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    assert runner.results_folder(None) == tmp_path / family
    assert runner.results_folder(tmp_path / "mine") == tmp_path / "mine"
