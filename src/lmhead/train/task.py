"""`Task`: model, data and loss of a training run; the training loop uses nothing else.

To train something new, subclass `Task` and call `Trainer(task, config, run).run()`. The constructor
loads the data, calls `torch.manual_seed` and makes the model; its arguments are (config, run, say).
Add the class to `TASKS` (run_folder.py) for `lmhead train --task NAME`; its settings are fields of
`TrainConfig`. For a resumed run to be bit-identical, `batch` must keep no state (use
`random_numbers(seed, step, micro)`), and `validate` and `sample` must not change what is trained.
`--shard vocab` needs `model.head` and an attribute `criterion` that `loss` calls, see `make_loss`.
Dropout uses torch's global generator, which checkpoints save.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from torch import Tensor, nn


class Task(ABC):
    """Batches, their loss, and validation.

    Attributes:
        model: the model; its parameters that require gradients are trained.
        tokenizer_json: the tokenizer, in the JSON format of the `tokenizers` library.
    """

    model: nn.Module
    tokenizer_json: str

    @abstractmethod
    def batch(self, step: int, micro: int) -> Any:
        """Return batch `micro` (from 0) of a step; equal arguments always give the same batch."""

    def shard(self, batch: Any, rank: int, size: int) -> Any:
        """Return the rows of a batch that belong to a rank, every `size`-th, for data parallelism.

        The default is for a `NamedTuple` of tensors whose first dimension is rows. A rank beyond
        the last row gets no rows.
        """
        return type(batch)(
            *(part[rank::size] if isinstance(part, Tensor) else part for part in batch)
        )

    @abstractmethod
    def items(self, batch: Any) -> int:
        """Return the number of targets of the batch that count in the loss."""

    @abstractmethod
    def loss(self, batch: Any, num_items: int) -> Tensor:
        """Return the sum of the batch's losses / `num_items`, the targets of the whole step."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Return metrics on held-out data, {} if there is none.

        The checkpoint with the lowest "loss" is the best one. Called in evaluation mode, without
        gradients.
        """

    def sample(self) -> str:
        """Return sample text, "" for none; called as `validate` is."""
        return ""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the model's part of a checkpoint's `config.json`: "kind", "model" and so on."""


def random_numbers(seed: int, step: int, micro: int = 0) -> np.random.Generator:
    """Return a random generator that is a function of its arguments, so that it needs no saving.

    >>> int(random_numbers(0, 7).integers(100)) == int(random_numbers(0, 7).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, micro, step]))
