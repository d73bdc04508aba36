"""Every program in examples/ runs with --quick, and the notebook runs from start to end."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from preloaded_python import preloaded_python
from torch import nn

import lmhead

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"

# What each prints, as a pattern. finetune_smollm2.py is run by tests/models/test_trainer.py.
PRINTS = {
    "certified_generate": r"the same tokens: True\nrows of the weight that were read: \d",
    "constrained_decoding": r"schema: \{'city': '\w+', 'large': \w+\}\nchoice:  (yes|no|perhaps)\n",
    "distill_hidden_states": r"3,588,096 bytes, as float32 logits 19,660,800; .*\nstep 0: KL .*",
    "dpo_trl": r"loss 0\.6931 -> 0\.\d+",
    "grpo_trl": r"mean reward of each step: -?0\.\d+ -?0\.\d+",
    "nano_gpt": r"(step \d: loss \d\.\d+\n){10}T.{20}",
    "score_to_parquet": r"a: perplexity 22\.59, 9 tokens\n",
}
ELSEWHERE = {"finetune_smollm2", "hf_model", "vocab_parallel"}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == PRINTS.keys() | ELSEWHERE


@pytest.mark.filterwarnings("default")  # remarks of trainers on their environment
@pytest.mark.parametrize("name", PRINTS)
def test_example(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(PRINTS[name], printed), printed


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    example = EXAMPLES / "vocab_parallel.py"
    done = subprocess.run(
        [preloaded_python(), str(example), "--quick", "--processes", "2"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert "rows on this rank 2048" in done.stdout
    found = [float(value) for value in re.findall(r"loss ([\d.]+)", done.stdout)]

    # The same steps in this process, with nn.Linear.
    names = runpy.run_path(str(example))
    vocab, width, rows = names["VOCAB"], names["WIDTH"], names["ROWS"]
    with torch.random.fork_rng():
        head = nn.Linear(width, vocab, bias=False)
        torch.manual_seed(0)
        body = nn.Sequential(nn.Embedding(vocab, width), nn.Linear(width, width), nn.Tanh())
        head.weight = lmhead.LMHead(width, vocab).weight
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1.0)
        expected = []
        for _ in range(5):
            tokens = torch.randint(vocab, (rows,))
            loss = F.cross_entropy(head(body(tokens)), (tokens * 7 + 1) % vocab)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-5)


def test_page_lists_every_example() -> None:
    for page in ("docs/examples.md", "docs/examples.zh.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        named = set(re.findall(r"\| \[`(\w+\.\w+)`\]", text))
        assert named == {
            path.name
            for path in EXAMPLES.iterdir()
            if path.suffix in (".py", ".ipynb") and path.stem != "hf_model"
        }


def test_notebook(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra: dev)")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (extra: dev)")
    book = nbformat.read(EXAMPLES / "learn.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "commit it without outputs"
    runner = nbclient.NotebookClient(
        book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    runner.execute()
    shown = [
        output["data"]["text/html"]
        for cell in book.cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    for part in ("not computed", "Sampled, 1 row", "Answers", "perplexity", "<iframe"):
        assert any(part in html for html in shown), part
