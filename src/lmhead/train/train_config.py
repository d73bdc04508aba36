"""`TrainConfig`: all settings of a training run, with default, range and help text.

The options of `lmhead train` and the keys of a configuration file are made from its fields:
`learning_rate` is `--learning-rate` on the command line and `learning-rate = 0.001` in a file.
Imports no torch, so that `lmhead train --help` is fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same reader under its older name
    import tomli as tomllib


def _setting(
    group: str,
    default: Any,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
) -> Any:
    """Return a dataclass field with its help, the group it is listed under and its range."""
    metadata = {"group": group, "help": help, "low": low, "high": high, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


_data, _model, _head, _optimizer, _reports = (
    partial(_setting, group) for group in ("Data", "Model", "Head", "Optimizer", "Reports")
)


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a training run; the help text of each field explains it.

    >>> config = TrainConfig(steps=100, layers=2)
    >>> config.steps, config.batch
    (100, 16)
    >>> TrainConfig(batch=0)
    Traceback (most recent call last):
        ...
    ValueError: batch must be at least 1; got 0
    """

    corpus: tuple[str, ...] = _data((), "UTF-8 text files; - for standard input.")
    task: str = _data(
        "text",
        "Next-token prediction on text, or translation of sentence pairs.",
        choices=("text", "translate"),
    )
    tokenizer: str = _data(
        "bpe",
        "Byte-level BPE, single characters, or whole words.",
        choices=("bpe", "characters", "words"),
    )
    vocab_size: int = _data(4096, "Maximum vocabulary size (bpe and words).", low=2, high=2**22)
    valid_fraction: float = _data(
        0.1, "Fraction of the text, at its end, held out for validation.", low=0.0, high=0.9
    )
    held_out: int = _data(
        1000, "Translation: number of sentence pairs held out for validation.", low=0
    )
    reverse: bool = _data(False, "Translation: translate from the second column to the first.")

    layers: int = _model(4, "Transformer blocks (translation: encoder blocks).", low=1, high=10_000)
    decoder_layers: int = _model(
        0, "Translation: decoder blocks; 0 for as many as encoder blocks.", low=0, high=10_000
    )
    heads: int = _model(4, "Attention heads; must divide the width.", low=1)
    width: int = _model(128, "Hidden size.", low=1)
    block: int = _model(128, "Context length in tokens.", low=1)
    position: str = _model(
        "learned", "Position encoding.", choices=("learned", "sinusoidal", "rotary")
    )
    norm: str = _model("layer", "LayerNorm or RMSNorm.", choices=("layer", "rms"))
    activation: str = _model(
        "gelu", "Activation of the feed-forward layers.", choices=("relu", "gelu", "swiglu")
    )
    dropout: float = _model(0.0, "Dropout probability.", low=0.0, high=0.99)
    bias: bool = _model(False, "Use biases in linear layers and norms.")
    tied: bool = _model(True, "Share one weight between embedding and head (full and sampled).")

    head: str = _head(
        "full",
        "Full softmax, or an output layer for large vocabularies.",
        choices=("full", "adaptive", "hierarchical", "sampled"),
    )
    samples: int = _head(1024, "Random negative tokens per batch (--head sampled).", low=1)
    loss: str = _head(
        "exact",
        "Cross-entropy without a logits tensor, or torch's dense one for comparison.",
        choices=("exact", "dense"),
    )
    grad_filter: float = _head(
        0.0,
        "Probability mass that the gradient filter approximates; 0 for exact gradients.",
        low=0.0,
        high=0.99,
    )
    label_smoothing: float = _head(
        0.0, "Probability mass of the target that is spread over all tokens.", low=0.0, high=1.0
    )
    z_loss: float = _head(0.0, "Weight of the z-loss, logsumexp².", low=0.0)

    steps: int = _optimizer(2000, "Number of training steps.", low=1)
    batch: int = _optimizer(16, "Sequences per batch.", low=1, high=2**24)
    batch_tokens: int = _optimizer(
        1200, "Translation: maximum tokens per batch on either side, with padding.", low=1
    )
    accumulate: int = _optimizer(1, "Gradient accumulation: batches per step.", low=1, high=10**6)
    learning_rate: float = _optimizer(
        1e-3, "Peak learning rate, reached after the warm-up.", low=0.0
    )
    min_learning_rate: float = _optimizer(1e-4, "Learning rate at the last step.", low=0.0)
    warmup: int = _optimizer(100, "Warm-up steps.", low=0)
    beta1: float = _optimizer(0.9, "AdamW's beta1.", low=0.0, high=0.999999)
    beta2: float = _optimizer(0.99, "AdamW's beta2.", low=0.0, high=0.999999)
    weight_decay: float = _optimizer(0.1, "Weight decay of matrices; biases and norms have none.")
    clip: float = _optimizer(1.0, "Gradient-norm clip; 0 disables.", low=0.0)
    seed: int = _optimizer(0, "Random seed of weights, batches and dropout.", low=0, high=2**62)
    shard: str = _optimizer(
        "data",
        "With torchrun, what is split over processes: the batch (data), also all parameters "
        "(full, FSDP2), or also the vocabulary of embedding and head (vocab).",
        choices=("data", "full", "vocab"),
    )
    threads: int = _optimizer(0, "CPU threads; 0 for torch's default.", low=0, high=1024)

    log_every: int = _reports(10, "Steps between log lines.", low=1)
    eval_every: int = _reports(250, "Steps between validations; 0 disables.", low=0)
    eval_tokens: int = _reports(
        100_000, "Maximum tokens per validation; 0 for all held-out text.", low=0
    )
    save_every: int = _reports(250, "Steps between checkpoints.", low=1)
    keep: int = _reports(2, "Number of latest checkpoints to keep, besides the best one.", low=1)
    sample_tokens: int = _reports(
        64, "Tokens of sample text generated at each validation; 0 disables.", low=0
    )
    curve: bool = _reports(True, "Draw the loss curve as loss.png (needs matplotlib).")
    sample_prompt: str = _reports("\n", "Prompt of the sample text.")

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _cast(field.name, getattr(self, field.name), types[field.name])
            object.__setattr__(self, field.name, value)
            _check(field, value)
        if self.width % self.heads:
            raise ValueError(f"heads must divide width; got heads={self.heads}, width={self.width}")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate must be at most learning_rate={self.learning_rate:g}; "
                f"got {self.min_learning_rate:g}"
            )
        if self.loss == "dense" and (self.head != "full" or self.grad_filter):
            raise ValueError("loss='dense' requires head='full' and grad_filter=0")
        if self.head != "full" and self.grad_filter:
            raise ValueError(f"grad_filter requires head='full'; got head={self.head!r}")
        if self.shard == "vocab" and (self.head != "full" or self.loss != "exact"):
            raise ValueError(
                "shard='vocab' requires head='full' and loss='exact'; "
                f"got head={self.head!r}, loss={self.loss!r}"
            )

    def replace(self, **changes: Any) -> TrainConfig:
        """Return a copy with some settings changed.

        >>> TrainConfig().replace(steps=7).steps
        7
        """
        return TrainConfig(**{**dataclasses.asdict(self), **_known(changes, "setting")})

    def transformer_options(self) -> dict[str, Any]:
        """Return the options of a `TransformerConfig` that all tasks share."""
        return {
            "hidden_size": self.width, "num_attention_heads": self.heads, "max_length": self.block,
            "position": self.position, "norm": self.norm, "activation": self.activation,
            "bias": self.bias, "dropout": self.dropout,
        }  # fmt: skip

    def to_toml(self) -> str:
        """Return the settings as the text of a configuration file.

        >>> TrainConfig().to_toml().splitlines()[:4]
        ['# Data', 'corpus = []', 'task = "text"', 'tokenizer = "bpe"']
        """
        lines: list[str] = []
        group = ""
        for field in dataclasses.fields(self):
            if field.metadata["group"] != group:
                group = field.metadata["group"]
                lines += ["", f"# {group}"]
            # JSON strings, numbers and booleans are valid TOML, except that TOML escapes \u007f.
            value = json.dumps(getattr(self, field.name), ensure_ascii=False)
            lines.append(f"{option_name(field.name)} = {value}".replace("\x7f", "\\u007f"))
        return "\n".join(lines[1:]) + "\n"


# Settings that work well together. Options and configuration files override them.
PRESETS: dict[str, dict[str, Any]] = {
    # A book or two in 10 minutes on two cores.
    "cpu-small": {
        "tokenizer": "bpe", "vocab_size": 4096, "layers": 4, "heads": 4, "width": 192,
        "block": 128, "position": "rotary", "batch": 16, "steps": 3000, "dropout": 0.1,
        "learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup": 100,
    },
    # nanoGPT's small CPU configuration, with rotary positions: validation loss 1.77 after 2000
    # steps (1.91 with learned positions).
    "shakespeare-char": {
        "tokenizer": "characters", "layers": 4, "heads": 4, "width": 128, "block": 64,
        "position": "rotary", "batch": 12, "steps": 2000, "dropout": 0.0, "bias": False,
        "tied": True, "learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup": 100,
        "beta2": 0.99, "weight_decay": 0.1, "clip": 1.0, "valid_fraction": 0.1,
    },
    # Tens of thousands of sentence pairs in under half an hour on two cores.
    "translate": {
        "task": "translate", "vocab_size": 5000, "layers": 3, "heads": 4, "width": 256,
        "block": 64, "position": "sinusoidal", "activation": "relu", "bias": True, "dropout": 0.2,
        "label_smoothing": 0.1, "batch_tokens": 1200, "steps": 3000, "learning_rate": 1.2e-3,
        "min_learning_rate": 1e-5, "warmup": 400, "beta2": 0.98, "weight_decay": 0.01,
        "clip": 1.0, "eval_every": 500, "save_every": 500,
    },
}  # fmt: skip

# The preset of a task if none is named.
_PRESET_OF_TASK = {"translate": "translate"}

# Settings that may change when a run is resumed: its length and its reports, not what it learns.
MAY_CHANGE = (
    "steps", "log_every", "eval_every", "eval_tokens", "save_every", "keep", "sample_tokens",
    "curve", "sample_prompt", "shard", "threads",
)  # fmt: skip


def make_config(
    given: Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    file: str | Path | None = None,
) -> TrainConfig:
    """Combine a preset, a configuration file and given settings; the later override the earlier.

    A file may name its preset: `preset = "cpu-small"`.

    >>> make_config({"steps": 5}, preset="shakespeare-char").tokenizer
    'characters'
    """
    from_file = {} if file is None else read_toml(Path(file))
    named = from_file.pop("preset", None)
    preset = named if preset is None else preset
    task = (given or {}).get("task", from_file.get("task"))
    preset = _PRESET_OF_TASK.get(str(task)) if preset is None else preset
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {preset!r}")
    settings: dict[str, Any] = dict(PRESETS[preset]) if preset is not None else {}
    settings.update(_known(from_file, f"key in {file}:"))
    settings.update(_known(given or {}, "setting"))
    return TrainConfig(**settings)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the keys of a configuration file as field names; `preset` may be among them."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} must be a regular file; got a folder, pipe or device")
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in content.items()}


def option_name(field: str) -> str:
    """Return the name of a field on the command line and in a configuration file.

    >>> option_name("learning_rate")
    'learning-rate'
    """
    return field.replace("_", "-")


def _known(settings: Mapping[str, Any], kind: str) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(TrainConfig)]
    for name in settings:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"; did you mean {option_name(near[0])}?" if near else ""
            raise ValueError(f"unknown {kind} {option_name(name)!r}{hint}")
    return dict(settings)


def _cast(name: str, value: Any, kind: type) -> Any:
    """Convert an integer to float and strings to a tuple; refuse any other type."""
    if kind is float and type(value) is int:
        return float(value)
    if kind == _STRINGS:
        strings = (value,) if isinstance(value, str) else value
        if isinstance(strings, list | tuple) and all(isinstance(text, str) for text in strings):
            return tuple(strings)
    if type(value) is not kind:
        raise TypeError(f"{name} must be {_TYPES[kind]}; got {value!r}")
    return value


_STRINGS = tuple[str, ...]
_TYPES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    _STRINGS: "a list of strings",
}


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    allowed = field.metadata
    if allowed["choices"] and value not in allowed["choices"]:
        raise ValueError(
            f"{field.name} must be one of {', '.join(allowed['choices'])}; got {value!r}"
        )
    if isinstance(value, str | tuple):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{field.name} must be a finite number; got {value}")
    if value < allowed["low"]:
        raise ValueError(f"{field.name} must be at least {_text(allowed['low'])}; got {value}")
    if value > allowed["high"]:
        raise ValueError(f"{field.name} must be at most {_text(allowed['high'])}; got {value}")


def _text(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
