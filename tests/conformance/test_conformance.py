"""The conformance kit: this package passes, known bugs are found, and every case can fail."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded_python import preloaded_python
from torch import Tensor

from lmhead.conformance import CASES, Implementation, named, run_cases
from lmhead.conformance.__main__ import main
from lmhead.conformance.implementations import Ours

# What plain torch does otherwise; the day it agrees, this test says so.
TORCH_FAILS = {
    "smoothing_with_a_masked_token",
    "softcap_with_masked_tokens",
    "entropy_with_masked_tokens",
    "seed_of_a_row",
    "more_than_2_to_the_24_tokens",
    "nan_yields_no_token",
    "overflow_of_float32",
}
# Whether torch's product rounds the wrong way depends on the CPU.
MAY_FAIL = {
    "ties_go_to_the_lowest_id",
    "near_ties_are_decided_in_float64",
    "the_same_token_in_any_batch",
}


@pytest.mark.parametrize("case", CASES.values(), ids=lambda c: c.name)
def test_lmhead_passes(case: Any) -> None:
    (result,) = run_cases(named("lmhead"), [case])
    assert (result.status, result.detail) == ("passed", "")


def test_torch_fails_where_it_is_known_to() -> None:
    results = run_cases(named("torch"), CASES.values())
    failed = {r.case.name for r in results if r.status == "failed"}
    assert failed - MAY_FAIL == TORCH_FAILS
    assert all(r.detail for r in results if r.status != "passed")


class Faulty(Ours):
    """Wrong in every method, though of the right shapes."""

    def loss(self, hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
        scale = torch.ones(len(hidden)) if options.get("reduction") == "none" else torch.ones(())
        made = super().loss(hidden, weight, targets, **options)
        wrong = 0.1 * weight.square().sum() + (hidden - hidden).sqrt().sum()
        return made * 1.02 + scale * (wrong + 1e-3)

    def entropy(self, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return super().entropy(hidden, weight, bias).detach()

    def process(self, logits: Tensor, context: Tensor, **options: Any) -> Tensor:  # noqa: ARG002
        return logits

    def sample(self, logits: Tensor, **options: Any) -> Tensor:  # noqa: ARG002
        return torch.randint(1, min(90, logits.shape[1]), (len(logits),)).clamp(max=89)

    def argmax(self, hidden: Tensor, weight: Tensor) -> Tensor:  # noqa: ARG002
        return torch.full((len(hidden),), 2)

    def topk(self, hidden: Tensor, weight: Tensor, k: int) -> Tensor:
        return torch.randint(len(weight), (len(hidden), k))


@pytest.mark.parametrize("case", CASES.values(), ids=lambda c: c.name)
def test_every_case_can_fail(case: Any) -> None:
    torch.manual_seed(0)
    (result,) = run_cases(Faulty(), [case])
    assert result.status == "failed", case.name
    assert result.detail


def test_what_is_missing_is_unsupported() -> None:
    results = run_cases(Implementation(), CASES.values())
    assert {r.status for r in results} == {"unsupported"}

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(hidden @ weight.T, targets)

    only = type("Only", (Implementation,), {"loss": staticmethod(loss)})()
    by_name = {r.case.name: r for r in run_cases(only, CASES.values())}
    assert by_name["frozen_weight"].status == "passed"
    assert by_name["z_loss"].status == "unsupported"
    assert "z_loss" in by_name["z_loss"].detail


def test_every_case_has_an_origin_and_a_summary() -> None:
    for case in CASES.values():
        assert case.origin
        assert len(case.summary) > 10
        assert case.kind in ("loss", "sampler", "decode")
    assert len(CASES) >= 40


def test_table_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--case", "softcap_with_masked_tokens"]) == 0
    assert "softcap_with_masked_tokens  unsloth 10616  pass" in capsys.readouterr().out
    arguments = ["--case", "softcap_with_masked_tokens", "--implementation", "torch"]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "FAIL" in out
    assert "torch" in out
    assert "0 passed, 1 failed, 0 unsupported" in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--kind", "decode", "--implementation", "torch"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert report["implementation"] == "torch"
    assert report["version"] == torch.__version__
    assert report["failed"] == sum(c["status"] == "failed" for c in report["cases"]) > 0
    assert {c["kind"] for c in report["cases"]} == {"decode"}


def test_a_function_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch.nn.functional as F\n"
        "def loss(hidden, weight, targets, *, bias=None, ignore_index=-100, reduction='mean'):\n"
        "    return F.cross_entropy(F.linear(hidden, weight, bias), targets,\n"
        "                           ignore_index=ignore_index, reduction=reduction)\n"
        "def wrong(hidden, weight, targets, **options):\n"
        "    return loss(hidden, weight, targets) * 2\n"
    )
    run = [preloaded_python(), "-m", "lmhead.conformance", "--case", "ignored_rows"]
    run.append("--implementation")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name, code in (("mine:loss", 0), ("mine:wrong", 1), ("mine:absent", 2), ("nothing", 2)):
        made = subprocess.run(
            [*run, name], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert made.returncode == code, made.stdout + made.stderr
        assert "Traceback" not in made.stderr
        if code == 2:
            assert len(made.stderr.strip().splitlines()) == 1


def test_an_unknown_case_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--case", "nothing"])
    assert caught.value.code == 2
