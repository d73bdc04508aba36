"""`TextTask`: next-token prediction on text files, the task of `lmhead train corpus.txt`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmhead.models.checkpoint import build_head, specify_head
from lmhead.nn import DecoderConfig, DecoderLM
from lmhead.sampling import Sampler, generate
from lmhead.train.run_files import os_errors_as_train_errors
from lmhead.train.task import Task, random_numbers
from lmhead.train.token_data import Ids, TokenData, prepare
from lmhead.train.train_config import TrainConfig
from lmhead.train.training_loss import make_loss
from lmhead.train.vocabulary import END_OF_TEXT, UNKNOWN

_VALIDATION_TOKENS = 8192  # per batch


class TextBatch(NamedTuple):
    """Windows of a text (B, T), their next tokens (B, T), and the batch's number in the run."""

    ids: Tensor
    targets: Tensor
    number: int = 0


class TextTask(Task):
    """Next-token prediction."""

    model: DecoderLM

    def __init__(self, config: TrainConfig, run: Path, say: Callable[[str], object]) -> None:
        self.config = config
        with os_errors_as_train_errors(f"write the token files to {run}"):
            prepare([Path(path) for path in config.corpus], run / "data", config, say)
        self.tokens = TokenData(run / "data")
        self.tokenizer_json = self.tokens.tokenizer_json
        if len(self.tokens.train) <= config.block:
            raise ValueError(
                f"block must be below the {len(self.tokens.train)} tokens of the training text; "
                f"got {config.block}"
            )
        torch.manual_seed(config.seed)
        self.model = make_model(config, self.tokens)
        self.criterion = make_loss(config, self.model.head, self.tokens.counts)
        end = self.tokens.tokenizer.token_to_id(END_OF_TEXT)
        self.eos_token_ids = () if end is None else (int(end),)
        size = sum(p.numel() for p in self.model.parameters())
        say(
            f"{len(self.tokens.train):,} tokens to train on, {len(self.tokens.valid):,} held out; "
            f"{self.tokens.vocab_size:,} vocabulary entries, {size:,} parameters"
        )

    def batch(self, step: int, micro: int) -> TextBatch:
        """Return windows at random positions."""
        config, text = self.config, self.tokens.train
        draw = random_numbers(config.seed, step, micro)
        starts = draw.integers(len(text) - config.block, size=(config.batch, 1))
        number = step * config.accumulate + micro
        return _batch(text[starts + np.arange(config.block + 1)], number)

    def items(self, batch: TextBatch) -> int:
        """Return the number of targets: every token has a next one."""
        return batch.targets.numel()

    def loss(self, batch: TextBatch, num_items: int) -> Tensor:
        """Return the cross-entropy, with label smoothing and z-loss as configured."""
        return self.criterion(self.model.hidden(batch.ids), batch.targets, num_items, batch.number)

    def validate(self) -> dict[str, float]:
        """Return the mean cross-entropy of the held-out text, without label smoothing."""
        total, items = 0.0, 0
        for ids, targets, _ in self._held_out():
            logits = self.model.head(self.model.hidden(ids)).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
            total += loss.item()
            items += targets.numel()
        return {"loss": total / items} if items else {}

    def _held_out(self) -> Iterator[TextBatch]:
        text, config = self.tokens.valid, self.config
        block = min(config.block, len(text) - 1)
        if block < 1:
            return
        tokens = min(config.eval_tokens or len(text), len(text) - 1)
        windows = max(1, tokens // block)
        size = max(1, _VALIDATION_TOKENS // block)
        for first in range(0, windows, size):
            starts = np.arange(first, min(windows, first + size))[:, None] * block
            yield _batch(text[starts + np.arange(block + 1)])

    def sample(self) -> str:
        """Return a continuation of the sample prompt, always with the same random seed."""
        config, tokenizer = self.config, self.tokens.tokenizer
        prompt = encode_known(tokenizer, config.sample_prompt)[-config.block // 2 :] or [0]
        length = min(config.sample_tokens, config.block - len(prompt))
        if length < 1:
            return ""
        sampler = Sampler(temperature=0.8, top_p=0.95, seed=config.seed)
        generated = generate(self.model, prompt, sampler, max_new_tokens=length, eos_token_ids=())
        text: str = tokenizer.decode([*prompt, *generated.tokens], skip_special_tokens=False)
        return text.strip("\n")

    def describe(self) -> dict[str, Any]:
        """Return what `lmhead.models.load_checkpoint` reads."""
        return {
            "kind": "decoder",
            "model": self.model.config.to_dict(),
            "head": specify_head(self.config.head, self.model.head),
            "eos_token_ids": list(self.eos_token_ids),
        }


def make_model(config: TrainConfig, tokens: TokenData) -> DecoderLM:
    """Return the language model of the settings, initialised from torch's random state."""
    sizes = DecoderConfig(
        **config.transformer_options(),
        vocab_size=tokens.vocab_size,
        num_hidden_layers=config.layers,
        attention_dropout=config.dropout,
        tied=config.tied and config.head in ("full", "sampled"),
    )
    frequencies = None if config.head == "full" else tokens.counts() + 1
    return DecoderLM(sizes, head=build_head({"kind": config.head}, sizes, frequencies))


def encode_known(tokenizer: Any, text: str) -> list[int]:
    """Encode a text; drop characters that a "characters" vocabulary lacks."""
    if tokenizer.token_to_id(UNKNOWN) is None and tokenizer.token_to_id(END_OF_TEXT) is None:
        text = "".join(c for c in text if tokenizer.token_to_id(c) is not None)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _batch(windows: Ids, number: int = 0) -> TextBatch:
    rows = torch.from_numpy(windows.astype(np.int64))
    return TextBatch(rows[:, :-1], rows[:, 1:], number)
