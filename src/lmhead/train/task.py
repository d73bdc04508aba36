"""`Task`: what is learned. The loop knows nothing else of models, texts or losses.

To train something new, write a class with the methods of `Task` and hand it to the `Trainer`:

    class Translation(Task):
        def __init__(self, config, run, say): ...  # data and model; draw weights after manual_seed
        def batch(self, step, micro): ...          # a function of (seed, step, micro) alone
        def items(self, batch): ...                # how many targets count in it
        def loss(self, batch, num_items): ...      # Σ over the targets of the batch / num_items
        def validate(self): ...                    # {"loss": ..., "bleu": ...}
        def sample(self): ...                      # a text to look at, or ""
        def describe(self): ...                    # config.json: what opens the model again

    Trainer(Translation(config, run, print), config, run).run()

and name it in `TASKS` (run.py), so that `lmhead train --task NAME` finds it. Its own settings are
fields of `TrainConfig`. Resuming bit by bit needs two things of a task: `batch` keeps no state (use
`random_numbers(seed, step, micro)`), and `validate` and `sample` change nothing that is trained.
Dropout draws from torch's own generator, which checkpoints hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from torch import Tensor, nn


class Task(ABC):
    """What is learned: batches, their loss, validation.

    Attributes:
        model: what is trained; all its parameters that ask for gradients are.
        tokenizer_json: the vocabulary, as the `tokenizers` library writes it.
    """

    model: nn.Module
    tokenizer_json: str

    @abstractmethod
    def batch(self, step: int, micro: int) -> Any:
        """The batch number `micro` of a step; the same whenever it is asked for.

        Args:
            step: steps done so far.
            micro: 0 to accumulate - 1.
        """

    @abstractmethod
    def items(self, batch: Any) -> int:
        """How many targets of the batch count in the loss."""

    @abstractmethod
    def loss(self, batch: Any, num_items: int) -> Tensor:
        """The sum of the batch's losses divided by `num_items`, the targets of the whole step."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Figures on held-out data; "loss", lower is better, decides which checkpoint is best.

        {} where nothing is held out. The model is in evaluation mode, and gradients are off.
        """

    def sample(self) -> str:
        """A text to look at; "" for none. Called as `validate` is."""
        return ""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What `config.json` of a checkpoint says of the model: "kind", "model" and so on."""


def random_numbers(seed: int, step: int, micro: int = 0) -> np.random.Generator:
    """Random numbers that belong to a step: nothing has to be remembered to draw them again.

    >>> int(random_numbers(0, 7).integers(100)) == int(random_numbers(0, 7).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, micro, step]))
