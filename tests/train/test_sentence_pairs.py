"""Sentence pairs: what is read, what is held out, what a batch may hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmhead.train import CorpusError, TrainConfig, TrainError, make_config
from lmhead.train.sentence_pairs import (
    Pair,
    PairData,
    cut_batches,
    prepare,
    read_pairs,
    split_pairs,
)

LINES = "".join(f"word {i} and {i * i}\t词 {i} 和 {i * i}。\tCC-BY\n" for i in range(60))


def write(folder: Path, text: str = LINES) -> Path:
    path = folder / "pairs.tsv"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def made(folder: Path, **changes: Any) -> PairData:
    settings = {"task": "translate", "vocab_size": 320, "held_out": 10, "block": 64}
    prepare(
        [write(folder)], folder / "data", TrainConfig(**{**settings, **changes}), lambda _: None
    )
    return PairData(folder / "data")


def test_columns_byte_order_mark_and_line_ends(tmp_path: Path) -> None:
    text = "\ufeffHi.\t嗨。\tCC-BY\r\n\nGo on.\t 继续。 \n"
    path = write(tmp_path, text)
    assert read_pairs([path]) == [Pair("Hi.", "嗨。"), Pair("Go on.", "继续。")]
    assert read_pairs([path], reverse=True)[0] == Pair("嗨。", "Hi.")


@pytest.mark.parametrize("line", ["no tab", "\t", "source\t", "\ttarget"])
def test_lines_without_two_columns(tmp_path: Path, line: str) -> None:
    with pytest.raises(CorpusError, match=r"line 2 of .* must be a sentence, a tab and its transl"):
        read_pairs([write(tmp_path, f"a\tb\n{line}\n")])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"cannot read .*: No such file"):
        read_pairs([tmp_path / "missing.tsv"])
    (tmp_path / "latin.tsv").write_bytes(b"caf\xe9\tx\n")
    with pytest.raises(CorpusError, match="must be UTF-8 text"):
        read_pairs([tmp_path / "latin.tsv"])


def test_the_split_depends_on_the_source_only() -> None:
    pairs = [Pair(f"s{i % 50}", f"t{i}") for i in range(100)]
    train, held_out = split_pairs(pairs, 21)
    assert (len(train) < 80, len(held_out)) == (True, 21)
    assert not {p.source for p in train} & {p.source for p in held_out}
    assert [p for p in pairs if p in train] == train  # in the order of the file
    _, again = split_pairs(pairs[::-1], 21)
    assert again == held_out
    _, with_more = split_pairs([*pairs, Pair("another", "one")], 21)
    assert len(set(held_out) & set(with_more)) >= 20


def test_the_split_never_changes() -> None:
    """Figures of models are compared over the same pairs for ever."""
    _, held_out = split_pairs([Pair(str(i), "x") for i in range(1000)], 5)
    assert [p.source for p in held_out] == ["886", "286", "671", "245", "374"]


def test_token_files_hold_every_pair(tmp_path: Path) -> None:
    pairs = made(tmp_path)
    assert (len(pairs.lengths), len(pairs.held_out), pairs.too_long) == (50, 10, 0)
    train, held_out = split_pairs(read_pairs([tmp_path / "pairs.tsv"]), 10)
    assert pairs.held_out == held_out
    for index, pair in enumerate(train):
        source, target = pairs[index]
        assert (source[-1], target[-1]) == (2, 2)
        assert pairs.tokenizer.decode(source[:-1]) == pair.source
        assert pairs.tokenizer.decode(target[:-1]) == pair.target
        assert (len(source), len(target)) == tuple(pairs.lengths[index])


def test_long_pairs_are_left_out_and_counted(tmp_path: Path) -> None:
    whole = made(tmp_path)
    longest = int(whole.lengths.max(1).mean())
    (tmp_path / "again").mkdir()
    pairs = made(tmp_path / "again", block=longest)
    assert pairs.too_long == int((whole.lengths.max(1) > longest).sum()) > 0
    assert int(pairs.lengths.max()) <= longest
    (tmp_path / "more").mkdir()
    with pytest.raises(ValueError, match=r"block must be at least .* shortest pair; got 1"):
        made(tmp_path / "more", block=1)


def test_damaged_files_are_reported(tmp_path: Path) -> None:
    made(tmp_path)
    path = tmp_path / "data" / "ids.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(TrainError, match=r"damaged: ids\.bin has changed since the run began"):
        PairData(tmp_path / "data")


def test_settings_that_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="held_out must leave pairs to train on; got 60 of 60"):
        made(tmp_path, held_out=60)
    with pytest.raises(ValueError, match="vocab_size must be at least 259 for bpe; got 100"):
        made(tmp_path, vocab_size=100)
    with pytest.raises(ValueError, match="no corpus: give one file of sentence pairs"):
        prepare([], tmp_path / "data", TrainConfig(task="translate"), lambda _: None)


def test_batches_do_not_exceed_their_size() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 30, (500, 2)).astype(np.int32)
    lengths = lengths[np.lexsort((lengths[:, 1], lengths[:, 0]))]
    cuts = cut_batches(lengths, 100)
    assert [begin for begin, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == 500
    for begin, end in cuts:
        assert end > begin
        assert lengths[begin:end].max() * (end - begin) <= 100
    assert cut_batches(lengths[-1:], 1) == [(0, 1)]  # a pair that is longer than a batch


def test_the_task_implies_its_preset() -> None:
    config = make_config({"task": "translate", "steps": 7})
    assert (config.task, config.steps, config.label_smoothing) == ("translate", 7, 0.1)
    assert make_config({"task": "translate"}, preset="cpu-small").label_smoothing == 0.0
    assert make_config({}).task == "text"
