"""Translation: the task behind `lmhead train --task translate pairs.tsv`.

In:  files of sentence pairs, once; then the token files of the run.
Out: batches of pairs of similar length, the loss of an `EncoderDecoder`, validation by loss and
     BLEU over pairs that are held out.

The order of the pairs is drawn anew in every pass over them, as a function of the seed and of the
pass alone, so that a run that was stopped goes on with the batch that was next.
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
from lmhead.train.config import TrainConfig
from lmhead.train.files import explained
from lmhead.train.heads import make_loss
from lmhead.train.pairs import BEGIN, END, Pairs, cut_batches, encode_pairs, id_of, prepare
from lmhead.train.task import Task, random_numbers

IGNORED = -100
_SCORED = 200  # held-out pairs whose BLEU is told at each validation
_SHOWN = 5  # of which so many are shown


class Batch(NamedTuple):
    """Pairs of similar length: sources (B, S) and their mask, words (B, T) and those after them."""

    source: Tensor
    mask: Tensor | None
    ids: Tensor
    targets: Tensor


class TranslationTask(Task):
    """Learn to translate.

    Args:
        config: the settings.
        run: the folder; token files are made in it if they are not there.
        say: told what is being done.
    """

    model: EncoderDecoder

    def __init__(self, config: TrainConfig, run: Path, say: Callable[[str], object]) -> None:
        self.config = config
        for name, wanted in (("head", "full"), ("tokenizer", "bpe")):
            if getattr(config, name) != wanted:
                raise ValueError(
                    f"{name} must be {wanted!r} for translation; got {getattr(config, name)!r}"
                )
        with explained(f"write the token files to {run}"):
            prepare([Path(path) for path in config.corpus], run / "data", config, say)
        self.pairs = Pairs(run / "data")
        self.tokenizer_json = self.pairs.vocabulary_json
        vocabulary = self.pairs.vocabulary
        self.begin, self.end = (id_of(vocabulary, mark) for mark in (BEGIN, END))
        # Sorted by source length, then target length; ties are broken anew in every pass.
        lengths = self.pairs.lengths
        order = np.lexsort((lengths[:, 1], lengths[:, 0]))
        self.cuts = cut_batches(lengths[order], config.batch_tokens)
        self._order_of = lru_cache(maxsize=2)(self._draw_order)
        torch.manual_seed(config.seed)
        self.model = make_model(config, vocabulary.get_vocab_size())
        self.criterion = make_loss(config, self.model.head, lambda: None)
        self.translator = Translator(self.model, vocabulary, begin=self.begin, end=self.end)
        held = self.pairs.held_out
        self._held = [] if not held else self._held_batches()
        size = sum(p.numel() for p in self.model.parameters())
        left_out = f" ({self.pairs.too_long:,} too long)" if self.pairs.too_long else ""
        say(
            f"{len(lengths):,} pairs to train on{left_out}, {len(held):,} held out; "
            f"{vocabulary.get_vocab_size():,} words, {size:,} parameters, "
            f"{len(self.cuts) / config.accumulate:,.0f} steps to see all pairs once"
        )

    def batch(self, step: int, micro: int) -> Batch:
        """The pairs whose turn it is."""
        number = step * self.config.accumulate + micro
        epoch, place = divmod(number, len(self.cuts))
        pairs, batches = self._order_of(epoch)
        begin, end = self.cuts[batches[place]]
        return self._batch([self.pairs[int(pair)] for pair in pairs[begin:end]])

    def items(self, batch: Batch) -> int:
        """Target words, ends included."""
        return int((batch.targets != IGNORED).sum())

    def loss(self, batch: Batch, num_items: int) -> Tensor:
        """Cross-entropy of the target words."""
        return self.criterion(self._hidden(batch), batch.targets, num_items, 0)

    def validate(self) -> dict[str, float]:
        """Cross-entropy per token over all held-out pairs; BLEU of the first, greedily."""
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
        figures = {"loss": total / sum(self.items(batch) for batch in self._held)}
        if bleu.installed():
            scored = self.pairs.held_out[:_SCORED]
            made = self.translator.translate([pair.source for pair in scored], num_beams=1)
            texts = [found[0].text for found in made]
            figures["bleu"] = bleu.bleu(texts, [pair.target for pair in scored]).score
        return figures

    def sample(self) -> str:
        """A few held-out sentences, their references, and what the model makes of them."""
        shown = self.pairs.held_out[:_SHOWN]
        made = self.translator.translate([pair.source for pair in shown])
        return "\n".join(
            f"{pair.source}  →  {found[0].text}  ({pair.target})"
            for pair, found in zip(shown, made, strict=True)
        )

    def describe(self) -> dict[str, Any]:
        """For `lmhead.models.load_translator`."""
        return {
            "kind": "encoder-decoder",
            "model": self.model.config.to_dict(),
            "bos_token_id": self.begin,
            "eos_token_ids": [self.end],
        }

    def _draw_order(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The pairs in the order of their lengths, ties by chance; the batches by chance."""
        draw, lengths = random_numbers(self.config.seed, epoch), self.pairs.lengths
        chance = draw.permutation(len(lengths))
        return (
            np.lexsort((chance, lengths[:, 1], lengths[:, 0])),
            draw.permutation(len(self.cuts)),
        )

    def _batch(self, pairs: list[tuple[list[int], list[int]]]) -> Batch:
        source, mask = pad([source for source, _ in pairs], self.end)
        ids, _ = pad([[self.begin, *target[:-1]] for _, target in pairs], self.end)
        targets, _ = pad([target for _, target in pairs], IGNORED)
        return Batch(source, mask, ids, targets)

    def _hidden(self, batch: Batch) -> Tensor:
        memory = self.model.encode(batch.source, batch.mask)
        hidden, _ = self.model.decode(batch.ids, memory, batch.mask)
        return hidden

    def _held_batches(self) -> list[Batch]:
        ids, lengths = encode_pairs(self.pairs.vocabulary, self.pairs.held_out)
        order = np.lexsort((lengths[:, 1], lengths[:, 0]))
        pairs = []
        for i in order:
            source, target = np.split(ids[i], lengths[i, :1])
            pairs.append((source.tolist(), target.tolist()))
        cuts = cut_batches(lengths[order], self.config.batch_tokens)
        return [self._batch(pairs[begin:end]) for begin, end in cuts]


def make_model(config: TrainConfig, vocab_size: int) -> EncoderDecoder:
    """The encoder and decoder of the settings, initialised by torch's random numbers."""
    return EncoderDecoder(
        EncoderDecoderConfig(
            vocab_size=vocab_size,
            hidden_size=config.width,
            num_attention_heads=config.heads,
            encoder_layers=config.layers,
            decoder_layers=config.decoder_layers or config.layers,
            max_length=config.block,
            position=config.position,  # type: ignore[arg-type]
            norm=config.norm,  # type: ignore[arg-type]
            activation=config.activation,  # type: ignore[arg-type]
            bias=config.bias,
            dropout=config.dropout,
            tied=config.tied,
            # As in the Transformer of 2017: embeddings of length 1, times √D.
            embedding_scale=math.sqrt(config.width),
            init="xavier",
            init_std=1 / math.sqrt(config.width),
        )
    )
