"""Our head inside `transformers.Trainer`, with gradient accumulation: same losses, no logits."""

import runpy
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from torch.utils.data import Dataset
from torch_watch import no_tensor_of

from lmhead import LMHead
from lmhead.models import load_huggingface, open_model
from models import hf_folders

pytest.importorskip("accelerate")
transformers = hf_folders.transformers
# The Trainer's own remarks on its environment are not about us.
pytestmark = pytest.mark.filterwarnings("default")

ROWS, LENGTH = 2, 32


class Texts(Dataset[dict[str, Any]]):
    """Texts of different lengths: micro-batches then count different numbers of tokens."""

    def __init__(self, vocab: int, count: int = 24) -> None:
        draw = torch.Generator().manual_seed(3)
        self.ids = torch.randint(4, vocab, (count, LENGTH), generator=draw)
        self.kept = torch.randint(4, LENGTH + 1, (count,), generator=draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> dict[str, Any]:
        labels = self.ids[row].clone()
        labels[int(self.kept[row]) :] = -100
        return {"input_ids": self.ids[row], "labels": labels}


def train(
    folder: Path,
    family: str,
    *,
    lazy: bool,
    vocab: int = hf_folders.VOCAB,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Any:
    """Three steps of four micro-batches, and an evaluation; gives the trainer."""
    model = hf_folders.make(family, vocab_size=vocab)
    if lazy:
        model.lm_head = LMHead.from_linear(model.lm_head)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=ROWS,
            gradient_accumulation_steps=4,
            max_steps=3,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            prediction_loss_only=True,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=1,
        ),
        train_dataset=Texts(vocab),
        eval_dataset=Texts(vocab, 4),
    )
    with around():
        trainer.train()
        trainer.evaluate()
    return trainer


def losses(trainer: Any) -> list[float]:
    history = trainer.state.log_history
    return [entry[key] for entry in history for key in ("loss", "eval_loss") if key in entry]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])  # own, tied, soft-capped
def test_the_same_losses_and_weights(tmp_path: Path, family: str) -> None:
    ours, theirs = (train(tmp_path, family, lazy=lazy) for lazy in (True, False))
    assert len(losses(ours)) == 4
    assert losses(ours) == pytest.approx(losses(theirs), rel=2e-5)
    assert losses(ours)[0] != pytest.approx(losses(ours)[2], rel=1e-4)  # it did learn
    expected = dict(theirs.model.named_parameters())
    for name, parameter in ours.model.named_parameters():
        assert_close(parameter.detach(), expected[name].detach(), rtol=5e-3, atol=5e-4, what=name)


def test_less_memory(tmp_path: Path) -> None:
    vocab = 20_000

    def around() -> AbstractContextManager[Any]:
        return no_tensor_of(ROWS * (LENGTH - 1), vocab)

    train(tmp_path, "llama", lazy=True, vocab=vocab, around=around)
    with pytest.raises(AssertionError, match="allocated"):
        train(tmp_path, "llama", lazy=False, vocab=vocab, around=around)


def test_what_it_saves_is_a_folder_that_opens(tmp_path: Path) -> None:
    trainer = train(tmp_path, "llama", lazy=True)
    trainer.save_model(str(tmp_path / "saved"))
    hf_folders.write_tokenizer(tmp_path / "saved")
    opened = load_huggingface(tmp_path / "saved")
    assert torch.equal(opened.head.weight, trainer.model.lm_head.weight)


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_folders.write(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("what a thing, " * 20)
    example = Path(__file__).resolve().parents[2] / "examples" / "finetune_smollm2.py"
    out = tmp_path / "out"
    options = ["--model", tmp_path / "model", "--out", out, "--steps", "2", "--block", "16"]
    monkeypatch.setattr(sys, "argv", [str(part) for part in (example, text, *options)])
    runpy.run_path(str(example), run_name="__main__")
    before, after = open_model(tmp_path / "model"), open_model(out)
    assert not torch.equal(before.head.weight, after.head.weight)
    monkeypatch.setattr(
        sys, "argv", [str(example), str(text), "--model", str(out), "--block", "999"]
    )
    with pytest.raises(SystemExit):
        runpy.run_path(str(example), run_name="__main__")
