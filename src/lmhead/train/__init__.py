"""Train a model: data, loop, checkpoints.

In:  text files or files of sentence pairs, and a `TrainConfig`.
Out: the folder of a run: checkpoints that `lmhead.models` opens, a log, a loss curve.
May be called by: `cli`, and programs.

Read in this order: `config`, `task`, `loop`, `checkpoints`, `files`; then `corpus`, `vocabulary`,
`tokens`, `text`, `heads`; `pairs`, `translation` and `bleu` for translation; `run` puts them
together. Names are loaded on first use: the settings need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmhead.models.checkpoint import load_checkpoint
    from lmhead.train.config import PRESETS, TrainConfig, make_config
    from lmhead.train.corpus import CorpusError
    from lmhead.train.exporting import export
    from lmhead.train.files import TrainError
    from lmhead.train.loop import Result, Trainer
    from lmhead.train.run import resume, train
    from lmhead.train.task import Task, random_numbers

_HOME = {
    "PRESETS": "lmhead.train.config",
    "CorpusError": "lmhead.train.corpus",
    "Result": "lmhead.train.loop",
    "Task": "lmhead.train.task",
    "TrainConfig": "lmhead.train.config",
    "TrainError": "lmhead.train.files",
    "Trainer": "lmhead.train.loop",
    "export": "lmhead.train.exporting",
    "load_checkpoint": "lmhead.models.checkpoint",
    "make_config": "lmhead.train.config",
    "random_numbers": "lmhead.train.task",
    "resume": "lmhead.train.run",
    "train": "lmhead.train.run",
}

__all__ = [
    "PRESETS",
    "CorpusError",
    "Result",
    "Task",
    "TrainConfig",
    "TrainError",
    "Trainer",
    "export",
    "load_checkpoint",
    "make_config",
    "random_numbers",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lmhead.train' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
