"""The translation task: batches, loss, resuming bit for bit, and a language that it learns."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close

from lmhead.train import TrainConfig, bleu, resume, train
from lmhead.train.translation_task import IGNORED, TranslationTask
from train.runs import fingerprint, history

DIGITS = "零一二三四五六七八九"

SMALL: dict[str, Any] = {
    "task": "translate",
    "vocab_size": 300,
    "held_out": 10,
    "layers": 1,
    "decoder_layers": 2,
    "heads": 2,
    "width": 16,
    "block": 32,
    "position": "sinusoidal",
    "dropout": 0.1,
    "label_smoothing": 0.1,
    "batch_tokens": 60,
    "accumulate": 2,
    "steps": 8,
    "warmup": 2,
    "learning_rate": 0.01,
    "log_every": 2,
    "eval_every": 8,
    "save_every": 3,
    "curve": False,
    "threads": 1,
}


def pairs_file(folder: Path) -> Path:
    """Numbers, and how they are read in Chinese, digit by digit."""
    numbers = [*range(10, 100), *range(100, 1000, 7)]
    lines = [f"{n}\t{''.join(DIGITS[int(digit)] for digit in str(n))}\n" for n in numbers]
    path = folder / "pairs.tsv"
    if not path.exists():  # several ranks may call this at once
        path.write_text("".join(lines), encoding="utf-8")
    return path


def small(folder: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**SMALL, "corpus": [str(pairs_file(folder))], **changes})


def task(folder: Path, **changes: Any) -> TranslationTask:
    return TranslationTask(small(folder, **changes), folder / "run", lambda _: None)


def test_an_epoch_has_every_pair_once(tmp_path: Path) -> None:
    made = task(tmp_path)
    count = len(made.cuts)
    for epoch in range(2):
        seen = []
        for number in range(epoch * count, (epoch + 1) * count):
            batch = made.batch(*divmod(number, 2))
            for source, targets in zip(batch.source.tolist(), batch.targets.tolist(), strict=True):
                seen.append((tuple(source), tuple(t for t in targets if t != IGNORED)))
            assert batch.ids[:, 0].eq(made.begin).all()
            assert max(batch.source.numel(), batch.ids.numel()) <= 60
            inside = batch.targets[:, :-1].ne(IGNORED) & batch.targets[:, 1:].ne(IGNORED)
            assert batch.ids[:, 1:][inside].equal(batch.targets[:, :-1][inside])
        assert len(seen) == len(made.pairs.lengths)
        assert len({target for _, target in seen}) == len(seen)
    other = task(tmp_path, seed=1)
    again = task(tmp_path)
    assert made.batch(3, 1).ids.equal(again.batch(3, 1).ids)
    assert any(
        made.batch(step, 0).ids.shape != other.batch(step, 0).ids.shape
        or not made.batch(step, 0).ids.equal(other.batch(step, 0).ids)
        for step in range(4)
    )


def test_the_loss_is_that_of_each_pair_alone(tmp_path: Path) -> None:
    """Padding changes nothing, label smoothing is torch's, and num_items divides."""
    made = task(tmp_path, dropout=0.0)
    total, items = 0.0, 0
    for index in range(7):
        source, target = made.pairs[index]
        logits = made.model(torch.tensor([source]), torch.tensor([[made.begin, *target[:-1]]]))
        dense = F.linear(made._hidden(made._batch([(source, target)])), made.model.embedding.weight)
        assert logits.shape == dense.shape
        total += float(
            F.cross_entropy(
                dense[0].detach(), torch.tensor(target), label_smoothing=0.1, reduction="sum"
            )
        )
        items += len(target)
    batch = made._batch([made.pairs[index] for index in range(7)])
    assert made.items(batch) == items
    assert float(made.loss(batch, items).detach()) == pytest.approx(total / items, rel=1e-5)
    assert float(made.loss(batch, 5).detach()) == pytest.approx(total / 5, rel=1e-5)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    config = small(tmp_path, keep=9, block=12)
    result = train(config, whole)
    shutil.copytree(whole, stopped)
    for step in (6, 8):  # as if killed behind step 3
        shutil.rmtree(stopped / "checkpoints" / f"step-{step:08}")
    again = resume(stopped)
    assert result.step == again.step == 8
    assert fingerprint(result.checkpoint) == fingerprint(again.checkpoint)
    assert history(whole) == history(stopped)
    (figures,) = [line["valid"] for line in history(whole) if "valid" in line]
    assert figures["loss"] > 0


def test_it_learns_to_read_numbers(tmp_path: Path) -> None:
    made = task(tmp_path, dropout=0.0, width=32, batch_tokens=200, accumulate=1, vocab_size=280)
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-2)
    for step in range(150):
        batch = made.batch(step, 0)
        loss = made.loss(batch, made.items(batch))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    made.model.eval()
    with torch.no_grad():
        figures = made.validate()
        assert figures["loss"] < 0.5
        assert ("bleu" in figures) == bleu.installed()
        shown = made.sample()
    assert shown.count("\n") == 4
    right = 0
    for pair in made.pairs.held_out:
        best, second = made.translator.translate([pair.source], num_beams=4, n_best=2)[0]
        assert best.score >= second.score
        right += best.text == pair.target
    assert right >= 7


def test_a_translation_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    made = task(tmp_path)
    made.model.eval()
    texts = ["12", "", "345 and more", " 12 ", "7"]
    together = made.translator.translate(texts, max_new_tokens=6)
    assert together[1] == []
    assert [t.text for t in together[0]] == [t.text for t in together[3]]
    for text, found in zip(texts, together, strict=True):
        alone = made.translator.translate([text], max_new_tokens=6)[0]
        assert [t.ids for t in alone] == [t.ids for t in found]
        assert_close(
            torch.tensor([t.score for t in alone]),
            torch.tensor([t.score for t in found]),
            atol=1e-5,
        )
    with pytest.raises(ValueError, match=r"n_best must be in \[1, 2\]; got 3"):
        made.translator.translate(["1"], num_beams=2, n_best=3)


def test_nothing_held_out(tmp_path: Path) -> None:
    made = task(tmp_path, held_out=0)
    assert made.validate() == {}
    assert made.sample() == ""


def test_settings_that_are_for_other_tasks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head must be 'full' for translation; got 'adaptive'"):
        task(tmp_path, head="adaptive")
    with pytest.raises(ValueError, match="tokenizer must be 'bpe' for translation; got 'words'"):
        task(tmp_path, tokenizer="words")
