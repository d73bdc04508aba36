"""Settings: one dataclass gives options, file keys, defaults and checks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lmhead.cli.cmd_train import command
from lmhead.train import PRESETS, TrainConfig, make_config
from lmhead.train.train_config import MAY_CHANGE, read_toml


def test_a_file_round_trips(tmp_path: Path) -> None:
    config = TrainConfig(
        corpus=("a b.txt", "猫.txt"),
        steps=7,
        min_learning_rate=2.5e-5,
        bias=True,
        sample_prompt='say "hi"\n\t\x7f\x01 \\ 😀',
    )
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8", newline="")
    assert TrainConfig(**read_toml(path)) == config


def test_options_override_files_and_files_override_presets(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('preset = "shakespeare-char"\nsteps = 9\nlearning-rate = 1\nbatch_size = 3\n')
    with pytest.raises(ValueError, match=r"unknown key in .*: 'batch-size'; did you mean batch"):
        make_config(file=path)
    path.write_text('preset = "shakespeare-char"\nsteps = 9\nlearning-rate = 1\nbatch = 3\n')
    config = make_config({"steps": 5}, file=path)
    assert (config.steps, config.batch, config.learning_rate) == (5, 3, 1.0)
    assert config.tokenizer == "characters"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid(name: str) -> None:
    config = make_config(preset=name)
    assert all(getattr(config, key) == value for key, value in PRESETS[name].items())


def test_every_setting_is_an_option_with_its_default_in_the_help() -> None:
    options = {parameter.name: parameter for parameter in command.params}
    for field in dataclasses.fields(TrainConfig):
        option: Any = options[field.name]
        if field.name != "corpus":
            assert field.metadata["help"] in option.help
            assert "[default: " in option.help
            assert option.default is None
    assert set(MAY_CHANGE) <= {field.name for field in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps must be at least 1; got 0"),
        ({"steps": 2.5}, TypeError, "steps must be an integer; got 2.5"),
        ({"steps": True}, TypeError, "steps must be an integer; got True"),
        ({"bias": 1}, TypeError, "bias must be true or false; got 1"),
        ({"dropout": 1.5}, ValueError, "dropout must be at most 0.99; got 1.5"),
        ({"clip": float("nan")}, ValueError, "clip must be a finite number; got nan"),
        ({"z_loss": float("inf")}, ValueError, "z_loss must be a finite number; got inf"),
        ({"learning_rate": float("inf")}, ValueError, "learning_rate must be a finite number"),
        ({"vocab_size": 10**15}, ValueError, "vocab_size must be at most 4,194,304; got 10{15}"),
        ({"threads": 100_000}, ValueError, "threads must be at most 1,024; got 100000"),
        ({"layers": 10**9}, ValueError, "layers must be at most 10,000"),
        ({"weight_decay": float("-inf")}, ValueError, "weight_decay must be a finite number"),
        ({"tokenizer": "morse"}, ValueError, "tokenizer must be one of bpe, .*; got 'morse'"),
        ({"heads": 3, "width": 16}, ValueError, "heads must divide width; got heads=3, width=16"),
        ({"corpus": [1]}, TypeError, r"corpus must be a list of strings; got \[1\]"),
        ({"learning_rate": 1e-5}, ValueError, "min_learning_rate must be at most learning_rate"),
        ({"loss": "dense", "grad_filter": 0.1}, ValueError, "loss='dense' requires head='full'"),
        ({"head": "adaptive", "grad_filter": 0.1}, ValueError, "grad_filter requires head='full'"),
    ],
)
def test_wrong_settings_are_named(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TrainConfig(**settings)


def test_files_that_are_not_settings(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*No such file"):
        make_config(file=tmp_path / "missing.toml")
    path = tmp_path / "config.toml"
    path.write_bytes(b"steps = \n")
    with pytest.raises(ValueError, match="is not TOML"):
        make_config(file=path)
    path.write_bytes(b"steps = 3 # \xff\n")
    with pytest.raises(ValueError, match="is not TOML"):
        make_config(file=path)
    with pytest.raises(ValueError, match=r"preset must be one of cpu-small, .*; got 'huge'"):
        make_config(preset="huge")


def test_settings_that_are_no_file_or_nested_too_deeply(tmp_path: Path) -> None:
    deep = tmp_path / "deep.toml"
    deep.write_text("a = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_toml(deep)
    with pytest.raises(ValueError, match="must be a regular file"):
        read_toml(Path("/dev/zero"))
