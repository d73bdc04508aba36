"""`TranslationTask`: an encoder-decoder on sentence pairs, for `lmhead train --task translate`.

The order of the pairs in each epoch is a function of seed and epoch only, so that a resumed run
continues with the next batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmhead.models.translator import Translator, pad
from lmhead.nn import EncoderDecoder, EncoderDecoderConfig
from lmhead.train import bleu
from lmhead.train.run_files import os_errors_as_train_errors
from lmhead.train.sentence_pairs import (
    BEGIN,
    END,
    PairData,
    cut_batches,
    encode_pairs,
    prepare,
    special_id,
)
from lmhead.train.task import Task, random_numbers
from lmhead.train.train_config import TrainConfig
from lmhead.train.training_loss import make_loss

IGNORED = -100
_BLEU_PAIRS = 200  # held-out pairs translated for BLEU at each validation
_SAMPLE_PAIRS = 5  # held-out pairs shown as sample text


class PairBatch(NamedTuple):
    """Pairs of similar length: sources and their mask (B, S), target inputs and targets (B, T)."""

    source: Tensor
    mask: Tensor | None
    ids: Tensor
    targets: Tensor


class TranslationTask(Task):
    """Translation of sentence pairs."""

    model: EncoderDecoder

    def __init__(self, config: TrainConfig, run: Path, say: Callable[[str], object]) -> None:
        self.config = config
        for name, required in (("head", "full"), ("tokenizer", "bpe")):
            value = getattr(config, name)
            if value != required:
                raise ValueError(f"{name} must be {required!r} for translation; got {value!r}")
        with os_errors_as_train_errors(f"write the token files to {run}"):
            prepare([Path(path) for path in config.corpus], run / "data", config, say)
        self.pairs = PairData(run / "data")
        self.tokenizer_json = self.pairs.tokenizer_json
        tokenizer = self.pairs.tokenizer
        self.begin, self.end = special_id(tokenizer, BEGIN), special_id(tokenizer, END)
        # Sorted by source length, then target length; ties are broken anew in every epoch.
        lengths = self.pairs.lengths
        order = np.lexsort((lengths[:, 1], lengths[:, 0]))
        self.cuts = cut_batches(lengths[order], config.batch_tokens)
        self._order_of = lru_cache(maxsize=2)(self._draw_order)
        torch.manual_seed(config.seed)
        self.model = make_model(config, tokenizer.get_vocab_size())
        self.criterion = make_loss(config, self.model.head, lambda: None)
        self.translator = Translator(self.model, tokenizer, begin=self.begin, end=self.end)
        held = self.pairs.held_out
        self._held = [] if not held else self._held_batches()
        size = sum(p.numel() for p in self.model.parameters())
        left_out = f" ({self.pairs.too_long:,} too long)" if self.pairs.too_long else ""
        say(
            f"{len(lengths):,} pairs to train on{left_out}, {len(held):,} held out; "
            f"{tokenizer.get_vocab_size():,} vocabulary entries, {size:,} parameters, "
            f"{len(self.cuts) / config.accumulate:,.0f} steps per epoch"
        )

    def batch(self, step: int, micro: int) -> PairBatch:
        """Return the next pairs of the epoch."""
        number = step * self.config.accumulate + micro
        epoch, index = divmod(number, len(self.cuts))
        pairs, batches = self._order_of(epoch)
        begin, end = self.cuts[batches[index]]
        return self._batch([self.pairs[int(pair)] for pair in pairs[begin:end]])

    def items(self, batch: PairBatch) -> int:
        """Return the number of target tokens, ends included."""
        return int((batch.targets != IGNORED).sum())

    def loss(self, batch: PairBatch, num_items: int) -> Tensor:
        """Return the cross-entropy of the target tokens."""
        return self.criterion(self._hidden(batch), batch.targets, num_items, 0)

    def validate(self) -> dict[str, float]:
        """Return cross-entropy per held-out token, and BLEU of the first pairs (greedy search)."""
        if not self._held:
            return {}
        total = sum(
            float(
                torch.nn.functional.cross_entropy(
                    self.model.head(self._hidden(batch)).flatten(0, 1),
                    batch.targets.flatten(),
                    reduction="sum",
                    ignore_index=IGNORED,
                )
            )
            for batch in self._held
        )
        metrics = {"loss": total / sum(self.items(batch) for batch in self._held)}
        if bleu.installed():
            scored = self.pairs.held_out[:_BLEU_PAIRS]
            translated = self.translator.translate([pair.source for pair in scored], num_beams=1)
            texts = [best[0].text for best in translated]
            metrics["bleu"] = bleu.bleu(texts, [pair.target for pair in scored]).score
        return metrics

    def sample(self) -> str:
        """Return a few held-out sentences with translation and reference."""
        shown = self.pairs.held_out[:_SAMPLE_PAIRS]
        translated = self.translator.translate([pair.source for pair in shown])
        return "\n".join(
            f"{pair.source}  →  {best[0].text}  ({pair.target})"
            for pair, best in zip(shown, translated, strict=True)
        )

    def describe(self) -> dict[str, Any]:
        """Return what `lmhead.models.load_translator` reads."""
        return {
            "kind": "encoder-decoder",
            "model": self.model.config.to_dict(),
            "bos_token_id": self.begin,
            "eos_token_ids": [self.end],
        }

    def _draw_order(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the pairs sorted by length, ties at random, and a random order of the batches."""
        draw, lengths = random_numbers(self.config.seed, epoch), self.pairs.lengths
        ties = draw.permutation(len(lengths))
        return (np.lexsort((ties, lengths[:, 1], lengths[:, 0])), draw.permutation(len(self.cuts)))

    def _batch(self, pairs: list[tuple[list[int], list[int]]]) -> PairBatch:
        source, mask = pad([source for source, _ in pairs], self.end)
        ids, _ = pad([[self.begin, *target[:-1]] for _, target in pairs], self.end)
        targets, _ = pad([target for _, target in pairs], IGNORED)
        return PairBatch(source, mask, ids, targets)

    def _hidden(self, batch: PairBatch) -> Tensor:
        memory = self.model.encode(batch.source, batch.mask)
        hidden, _ = self.model.decode(batch.ids, memory, batch.mask)
        return hidden

    def _held_batches(self) -> list[PairBatch]:
        ids, lengths = encode_pairs(self.pairs.tokenizer, self.pairs.held_out)
        order = np.lexsort((lengths[:, 1], lengths[:, 0]))
        pairs = []
        for i in order:
            source, target = np.split(ids[i], lengths[i, :1])
            pairs.append((source.tolist(), target.tolist()))
        cuts = cut_batches(lengths[order], self.config.batch_tokens)
        return [self._batch(pairs[begin:end]) for begin, end in cuts]


def make_model(config: TrainConfig, vocab_size: int) -> EncoderDecoder:
    """Return the encoder-decoder of the settings, initialised from torch's random state."""
    return EncoderDecoder(
        EncoderDecoderConfig(
            **config.transformer_options(),
            vocab_size=vocab_size,
            encoder_layers=config.layers,
            decoder_layers=config.decoder_layers or config.layers,
            tied=config.tied,
            # As in "Attention Is All You Need": embeddings of norm 1, times √D.
            embedding_scale=math.sqrt(config.width),
            init="xavier",
            init_std=1 / math.sqrt(config.width),
        )
    )
