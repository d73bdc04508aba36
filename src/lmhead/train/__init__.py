"""Train a model: data, training loop, checkpoints.

Read in this order: `train_config`, `task`, `training_loop`, `training_loss`, `checkpoints`,
`run_files`; then `text_task`, `token_data`, `vocabulary`; `translation_task`, `sentence_pairs` and
`bleu` for translation; `nonfinite` and `model_sharding`; `run_folder` puts them together. Names are
loaded on first use, so that the settings need no torch.
"""

from typing import TYPE_CHECKING

from lmhead.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lmhead.models.checkpoint import load_checkpoint as load_checkpoint
    from lmhead.train.checkpoints import export as export
    from lmhead.train.run_files import TrainError as TrainError
    from lmhead.train.run_folder import resume as resume
    from lmhead.train.run_folder import train as train
    from lmhead.train.task import Task as Task
    from lmhead.train.task import random_numbers as random_numbers
    from lmhead.train.token_data import CorpusError as CorpusError
    from lmhead.train.train_config import PRESETS as PRESETS
    from lmhead.train.train_config import TrainConfig as TrainConfig
    from lmhead.train.train_config import make_config as make_config
    from lmhead.train.training_loop import Result as Result
    from lmhead.train.training_loop import Trainer as Trainer

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "lmhead.models.checkpoint": ["load_checkpoint"],
        "lmhead.train.checkpoints": ["export"],
        "lmhead.train.run_files": ["TrainError"],
        "lmhead.train.run_folder": ["resume", "train"],
        "lmhead.train.task": ["Task", "random_numbers"],
        "lmhead.train.token_data": ["CorpusError"],
        "lmhead.train.train_config": ["PRESETS", "TrainConfig", "make_config"],
        "lmhead.train.training_loop": ["Result", "Trainer"],
    },
)
