"""`TrainConfig`: every setting of a training run, its default, its range and its help, once.

In:  options of the command line, a TOML file, a preset.
Out: a checked `TrainConfig`; the TOML file of a run.

The options of `lmhead train` and the keys of a configuration file are made from the fields here:
`learning_rate` is `--learning-rate` and `learning-rate = 0.001`. Loads no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same reader under its older name
    import tomli as tomllib


def _setting(
    default: Any,
    group: str,
    help: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field: its default, the heading it stands under, its help, what it may be."""
    facts = {"group": group, "help": help, "low": low, "high": high, "choices": choices}
    return dataclasses.field(default=default, metadata=facts)


@dataclass(frozen=True)
class TrainConfig:
    """The settings of a run; each field's help says what it means.

    >>> config = TrainConfig(steps=100, layers=2)
    >>> config.steps, config.batch
    (100, 16)
    >>> TrainConfig(batch=0)
    Traceback (most recent call last):
        ...
    ValueError: batch must be at least 1; got 0
    """

    # What is learned from
    corpus: tuple[str, ...] = _setting((), "Data", "Text files in UTF-8.")
    task: str = _setting(
        "text",
        "Data",
        "What is learned: the next word, or translation.",
        choices=("text", "translate"),
    )
    tokenizer: str = _setting(
        "bpe",
        "Data",
        "Byte-level BPE, characters, or words.",
        choices=("bpe", "characters", "words"),
    )
    vocab_size: int = _setting(4096, "Data", "Most words of the BPE or word vocabulary.", low=2)
    valid_fraction: float = _setting(
        0.1, "Data", "The end of the text that is held out for validation.", low=0.0, high=0.9
    )
    held_out: int = _setting(
        1000, "Data", "Translation: pairs held out, by a hash of the source.", low=0
    )
    reverse: bool = _setting(False, "Data", "Translation: from the second column to the first.")

    # The model
    layers: int = _setting(4, "Model", "Transformer blocks.", low=1)
    decoder_layers: int = _setting(
        0, "Model", "Translation: blocks that write; 0 for as many as read.", low=0
    )
    heads: int = _setting(4, "Model", "Attention heads; they divide the width.", low=1)
    width: int = _setting(128, "Model", "D, the size of a hidden state.", low=1)
    block: int = _setting(128, "Model", "Tokens that the model sees at once.", low=1)
    position: str = _setting(
        "learned",
        "Model",
        "How places are told apart.",
        choices=("learned", "sinusoidal", "rotary"),
    )
    norm: str = _setting("layer", "Model", "LayerNorm or RMSNorm.", choices=("layer", "rms"))
    activation: str = _setting(
        "gelu", "Model", "Of the feed-forward layers.", choices=("relu", "gelu", "swiglu")
    )
    dropout: float = _setting(0.0, "Model", "Share of activations put out.", low=0.0, high=0.99)
    bias: bool = _setting(False, "Model", "Biases in linear layers and norms.")
    tied: bool = _setting(True, "Model", "One weight for embedding and full head.")

    # The head and its loss
    head: str = _setting(
        "full",
        "Head",
        "Full softmax, or a head for large vocabularies.",
        choices=("full", "adaptive", "hierarchical", "sampled"),
    )
    samples: int = _setting(1024, "Head", "Random words of a batch for --head sampled.", low=1)
    loss: str = _setting(
        "exact",
        "Head",
        "Without logits in memory, or torch's dense cross-entropy to compare with.",
        choices=("exact", "dense"),
    )
    grad_filter: float = _setting(
        0.0, "Head", "Tail mass of the gradient filter; 0 for exact gradients.", low=0.0, high=0.99
    )
    label_smoothing: float = _setting(
        0.0, "Head", "Share of the target's mass spread over all words.", low=0.0, high=1.0
    )
    z_loss: float = _setting(0.0, "Head", "Weight of logsumexp².", low=0.0)

    # The optimizer
    steps: int = _setting(2000, "Optimizer", "Steps of the whole run.", low=1)
    batch: int = _setting(16, "Optimizer", "Rows of a batch.", low=1)
    batch_tokens: int = _setting(
        1200, "Optimizer", "Translation: tokens of a batch on either side, padding too.", low=1
    )
    accumulate: int = _setting(1, "Optimizer", "Batches whose gradients make one step.", low=1)
    learning_rate: float = _setting(1e-3, "Optimizer", "Highest rate, after the warm-up.", low=0.0)
    min_learning_rate: float = _setting(1e-4, "Optimizer", "Rate at the end.", low=0.0)
    warmup: int = _setting(100, "Optimizer", "Steps until the rate is at its highest.", low=0)
    beta1: float = _setting(0.9, "Optimizer", "AdamW's first decay.", low=0.0, high=0.999999)
    beta2: float = _setting(0.99, "Optimizer", "AdamW's second decay.", low=0.0, high=0.999999)
    weight_decay: float = _setting(0.1, "Optimizer", "Of matrices; biases and norms have none.")
    clip: float = _setting(1.0, "Optimizer", "Longest gradient; 0 for no bound.", low=0.0)
    seed: int = _setting(0, "Optimizer", "Of weights, batches and dropout.", low=0, high=2**62)
    threads: int = _setting(0, "Optimizer", "Threads; 0 for torch's choice.", low=0)

    # What is written, and when
    log_every: int = _setting(10, "Reports", "Steps between lines of the log.", low=1)
    eval_every: int = _setting(250, "Reports", "Steps between validations; 0 for none.", low=0)
    eval_tokens: int = _setting(
        100_000, "Reports", "Most tokens of a validation; 0 for all.", low=0
    )
    save_every: int = _setting(250, "Reports", "Steps between checkpoints.", low=1)
    keep: int = _setting(2, "Reports", "Last checkpoints to keep, besides the best.", low=1)
    sample_tokens: int = _setting(
        64, "Reports", "Tokens of sample text at each validation; 0 for none.", low=0
    )
    curve: bool = _setting(True, "Reports", "Draw the losses as loss.png, with matplotlib.")
    sample_prompt: str = _setting("\n", "Reports", "What the sample text goes on from.")

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
            raise ValueError("loss='dense' needs head='full' and grad_filter=0: it has all logits")
        if self.head != "full" and self.grad_filter:
            raise ValueError(f"grad_filter is for head='full'; got head={self.head!r}")

    def replace(self, **changes: Any) -> TrainConfig:
        """The same settings but for some.

        >>> TrainConfig().replace(steps=7).steps
        7
        """
        return TrainConfig(**{**dataclasses.asdict(self), **_known(changes, "setting")})

    def to_toml(self) -> str:
        """The settings as a configuration file.

        >>> TrainConfig().to_toml().splitlines()[:4]
        ['# Data', 'corpus = []', 'task = "text"', 'tokenizer = "bpe"']
        """
        lines: list[str] = []
        group = ""
        for field in dataclasses.fields(self):
            if field.metadata["group"] != group:
                group = field.metadata["group"]
                lines += ["", f"# {group}"]
            lines.append(f"{option_name(field.name)} = {_toml(getattr(self, field.name))}")
        return "\n".join(lines[1:]) + "\n"


# Settings that fit together. Options that are given as well win.
PRESETS: dict[str, dict[str, Any]] = {
    # 10 minutes on two cores for a book or two; reads like the book, from afar.
    "cpu-small": {
        "tokenizer": "bpe", "vocab_size": 4096, "layers": 4, "heads": 4, "width": 192,
        "block": 128, "position": "rotary", "batch": 16, "steps": 3000, "dropout": 0.1,
        "learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup": 100,
    },
    # The small set-up for a CPU that came with nanoGPT, with rotary positions: validation loss 1.77
    # after 2000 steps (1.91 with learned ones).
    "shakespeare-char": {
        "tokenizer": "characters", "layers": 4, "heads": 4, "width": 128, "block": 64,
        "position": "rotary", "batch": 12, "steps": 2000, "dropout": 0.0, "bias": False,
        "tied": True, "learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup": 100,
        "beta2": 0.99, "weight_decay": 0.1, "clip": 1.0, "valid_fraction": 0.1,
    },
    # Some ten thousand sentence pairs, in under half an hour on two cores.
    "translate": {
        "task": "translate", "vocab_size": 5000, "layers": 3, "heads": 4, "width": 256,
        "block": 64, "position": "sinusoidal", "activation": "relu", "bias": True, "dropout": 0.2,
        "label_smoothing": 0.1, "batch_tokens": 1200, "steps": 3000, "learning_rate": 1.2e-3,
        "min_learning_rate": 1e-5, "warmup": 400, "beta2": 0.98, "weight_decay": 0.01,
        "clip": 1.0, "eval_every": 500, "save_every": 500,
    },
}  # fmt: skip

# What a task begins with where no preset is named.
_PRESET_OF_TASK = {"translate": "translate"}

# What may be changed when a run goes on: how long it is and what it reports, not what it learns.
MAY_CHANGE = (
    "steps",
    "log_every",
    "eval_every",
    "eval_tokens",
    "save_every",
    "keep",
    "sample_tokens",
    "curve",
    "sample_prompt",
    "threads",
)


def make_config(
    given: Mapping[str, Any] | None = None,
    *,
    preset: str | None = None,
    file: str | Path | None = None,
) -> TrainConfig:
    """Settings from a preset, changed by a file, changed by what is given.

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
    settings.update(_known(from_file, f"key in {file}"))
    settings.update(_known(given or {}, "setting"))
    return TrainConfig(**settings)


def read_toml(path: Path) -> dict[str, Any]:
    """The keys of a configuration file, as field names; `preset` may be among them."""
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in content.items()}


def option_name(field: str) -> str:
    """As it is written on the command line and in a file.

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
            raise ValueError(f"there is no {kind} {option_name(name)!r}{hint}")
    return dict(settings)


def _cast(name: str, value: Any, kind: type) -> Any:
    """A whole number serves as a float, a list or a single text as texts; nothing else."""
    if kind is float and type(value) is int:
        return float(value)
    if kind == _TEXTS:
        texts = (value,) if isinstance(value, str) else value
        if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
    if type(value) is not kind:
        raise TypeError(f"{name} must be {_TYPES[kind]}; got {value!r}")
    return value


_TEXTS = tuple[str, ...]
_TYPES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    _TEXTS: "a list of texts",
}


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    facts = field.metadata
    if facts["choices"] and value not in facts["choices"]:
        raise ValueError(
            f"{field.name} must be one of {', '.join(facts['choices'])}; got {value!r}"
        )
    if isinstance(value, str | tuple):
        return
    if not value >= facts["low"]:
        raise ValueError(f"{field.name} must be at least {facts['low']:g}; got {value}")
    if not value <= facts["high"] or value == math.inf:
        raise ValueError(f"{field.name} must be at most {facts['high']:g}; got {value}")


def _toml(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's as well, but for \u007f, which is escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
