"""The next word of a text: the task behind `lmhead train corpus.txt`.

In:  text files, once; then the token files of the run.
Out: batches of windows at random places, the loss of a `DecoderLM`, validation over the held-out
     end of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmhead.models.heads import build_head, specify_head
from lmhead.nn import DecoderConfig, DecoderLM
from lmhead.sampling import Sampler, generate
from lmhead.train.config import TrainConfig
from lmhead.train.corpus import END
from lmhead.train.files import explained
from lmhead.train.heads import make_loss
from lmhead.train.task import Task, random_numbers
from lmhead.train.tokens import Ids, Tokens, prepare

_TOGETHER = 8192  # tokens of a batch of validation


class Batch(NamedTuple):
    """Windows of a text, (B, T) each: ids, and for each of them the id after it.

    `number` counts the batches of a run.
    """

    ids: Tensor
    targets: Tensor
    number: int = 0


class TextTask(Task):
    """Learn the next word of a text.

    Args:
        config: the settings.
        run: the folder; token files are made in it if they are not there.
        say: told what is being done.
    """

    model: DecoderLM

    def __init__(self, config: TrainConfig, run: Path, say: Callable[[str], object]) -> None:
        self.config = config
        with explained(f"write the token files to {run}"):
            prepare([Path(path) for path in config.corpus], run / "data", config, say)
        self.tokens = Tokens(run / "data")
        self.tokenizer_json = self.tokens.vocabulary_json
        if len(self.tokens.train) <= config.block:
            raise ValueError(
                f"block must be below the {len(self.tokens.train)} tokens of the training text; "
                f"got {config.block}"
            )
        torch.manual_seed(config.seed)
        self.model = make_model(config, self.tokens)
        self.criterion = make_loss(config, self.model.head, self.tokens.counts)
        end = self.tokens.vocabulary.token_to_id(END)
        self.eos_token_ids = () if end is None else (int(end),)
        size = sum(p.numel() for p in self.model.parameters())
        say(
            f"{len(self.tokens.train):,} tokens to train on, {len(self.tokens.valid):,} held out; "
            f"{self.tokens.vocab_size:,} words, {size:,} parameters"
        )

    def batch(self, step: int, micro: int) -> Batch:
        """Windows at random places."""
        config, text = self.config, self.tokens.train
        draw = random_numbers(config.seed, step, micro)
        starts = draw.integers(len(text) - config.block, size=(config.batch, 1))
        number = step * config.accumulate + micro
        return _batch(text[starts + np.arange(config.block + 1)], number)

    def items(self, batch: Batch) -> int:
        """Every token has a next one."""
        return batch.targets.numel()

    def loss(self, batch: Batch, num_items: int) -> Tensor:
        """Cross-entropy, with what the settings add to it."""
        return self.criterion(self.model.hidden(batch.ids), batch.targets, num_items, batch.number)

    def validate(self) -> dict[str, float]:
        """Mean cross-entropy of the held-out text, window by window, without smoothing."""
        total, items = 0.0, 0
        for ids, targets, _ in self._held_out():
            logits = self.model.head(self.model.hidden(ids)).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
            total += loss.item()
            items += targets.numel()
        return {"loss": total / items} if items else {}

    def _held_out(self) -> Iterator[Batch]:
        text, config = self.tokens.valid, self.config
        block = min(config.block, len(text) - 1)
        if block < 1:
            return
        most = config.eval_tokens or len(text)
        windows = max(1, min(most, len(text) - 1) // block)
        together = max(1, _TOGETHER // block)
        for first in range(0, windows, together):
            starts = np.arange(first, min(windows, first + together))[:, None] * block
            yield _batch(text[starts + np.arange(block + 1)])

    def sample(self) -> str:
        """What the model makes of the sample prompt, always with the same noise."""
        config, vocabulary = self.config, self.tokens.vocabulary
        prompt = encode_known(vocabulary, config.sample_prompt)[-config.block // 2 :] or [0]
        room = min(config.sample_tokens, config.block - len(prompt))
        if room < 1:
            return ""
        sampler = Sampler(temperature=0.8, top_p=0.95, seed=config.seed)
        made = generate(self.model, prompt, sampler, max_new_tokens=room, eos_token_ids=())
        text: str = vocabulary.decode([*prompt, *made.tokens], skip_special_tokens=False)
        return text.strip("\n")

    def describe(self) -> dict[str, Any]:
        """For `lmhead.models.checkpoint`."""
        return {
            "kind": "decoder",
            "model": self.model.config.to_dict(),
            "head": specify_head(self.config.head, self.model.head),
            "eos_token_ids": list(self.eos_token_ids),
        }


def make_model(config: TrainConfig, tokens: Tokens) -> DecoderLM:
    """The language model of the settings, initialised by torch's random numbers."""
    sizes = DecoderConfig(
        vocab_size=tokens.vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_length=config.block,
        position=config.position,  # type: ignore[arg-type]
        norm=config.norm,  # type: ignore[arg-type]
        activation=config.activation,  # type: ignore[arg-type]
        bias=config.bias,
        dropout=config.dropout,
        attention_dropout=config.dropout,
        tied=config.tied and config.head in ("full", "sampled"),
    )
    frequencies = None if config.head == "full" else tokens.counts() + 1
    return DecoderLM(sizes, head=build_head({"kind": config.head}, sizes, frequencies))


def encode_known(vocabulary: Any, text: str) -> list[int]:
    """The ids of a text; characters that a vocabulary of characters lacks are left out."""
    if vocabulary.token_to_id("<unk>") is None and vocabulary.token_to_id(END) is None:
        text = "".join(c for c in text if vocabulary.token_to_id(c) is not None)
    ids: list[int] = vocabulary.encode(text, add_special_tokens=False).ids
    return ids


def _batch(windows: Ids, number: int = 0) -> Batch:
    rows = torch.from_numpy(windows.astype(np.int64))
    return Batch(rows[:, :-1], rows[:, 1:], number)
