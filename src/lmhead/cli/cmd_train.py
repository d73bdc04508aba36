"""`lmhead train`: train a model. The options are the fields of `TrainConfig`."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import click

from lmhead.cli import _json
from lmhead.cli._command_group import (
    FOLDER,
    FileError,
    SectionedCommand,
    SectionedOption,
    as_usage_errors,
    choice_option,
    importing,
)
from lmhead.train.train_config import MAY_CHANGE, PRESETS, TrainConfig, make_config, option_name

_RANK = int(os.environ.get("RANK", "0"))  # set by torchrun


def _settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each field; its value is None if it was not given."""
    types = get_type_hints(TrainConfig)
    for field in reversed(dataclasses.fields(TrainConfig)):
        if field.name != "corpus":  # the argument
            command = _option(field, types[field.name])(command)
    return command


def _option(field: dataclasses.Field[Any], kind: Any) -> Callable[..., Any]:
    name, metadata = option_name(field.name), field.metadata
    option, shown = f"--{name}", json.dumps(field.default, ensure_ascii=False)
    if kind is bool:
        option, kind = f"--{name}/--no-{name}", None
        shown = f"--{name}" if field.default else f"--no-{name}"
    elif metadata["choices"]:
        kind, shown = click.Choice(metadata["choices"]), str(field.default)
    return click.option(
        option,
        field.name,
        type=kind,
        default=None,
        help=f"{metadata['help']}  [default: {shown}]",
        cls=SectionedOption,
        section=metadata["group"],
    )


@click.command("train", cls=SectionedCommand)
@click.argument("corpus", nargs=-1, type=click.Path(path_type=Path))
@click.option("--out", type=FOLDER, help="Folder for a new run.")
@click.option(
    "--resume",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Resume the run in this folder. Only these settings can change: "
    f"{', '.join(MAY_CHANGE)}.".replace("_", "-"),
)
@choice_option(
    "--preset",
    choices=list(PRESETS),
    help="Predefined settings; --config and options override them.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file with the settings below as keys; options override it.",
)
@_json.json_option
@_settings
def command(
    corpus: tuple[Path, ...],
    out: Path | None,
    resume: Path | None,
    preset: str | None,
    file: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a language model on text files, or a translation model on sentence pairs.

    The folder of a run holds its settings, checkpoints, a log in JSON lines and the loss curve.
    Ctrl-C and SIGTERM write a checkpoint and stop. After that, or after kill -9 or a power cut,
    --resume continues to the same weights, bit for bit, as an uninterrupted run.

    \b
    Examples:
      lmhead train book.txt --out run --preset cpu-small
      lmhead train input.txt --out run --preset shakespeare-char
      lmhead train *.txt --out run --tokenizer words --vocab-size 20000
      cat *.txt | lmhead train - --out run
      lmhead train --config run.toml --out run
      lmhead train --task translate pairs.tsv --out run
      torchrun --nproc-per-node 4 -m lmhead train book.txt --out run
      torchrun --nproc-per-node 4 -m lmhead train book.txt --out run --shard vocab
      lmhead train --resume run
      lmhead train --resume run --steps 5000
      lmhead generate run "ROMEO:"
    """
    given = {name: value for name, value in options.items() if value is not None}
    if (out is None) == (resume is None):
        raise click.UsageError(
            "Give --out FOLDER for a new run, or --resume FOLDER to continue one."
        )
    run = resume or out
    with _reported_by_rank_0(), as_usage_errors():
        if resume is not None:
            if corpus or preset or file:
                raise click.UsageError(
                    "--resume uses the run's own corpus and settings; remove CORPUS, --preset "
                    "and --config."
                )
            result = _call(lambda train: train.resume(resume, given))
        else:
            if corpus:
                given["corpus"] = [str(path) for path in corpus]
            config = make_config(given, preset=preset, file=file)
            result = _call(lambda train: train.train(config, out))
    if _RANK:
        pass
    elif as_json:
        fields = dataclasses.asdict(result) | {"checkpoint": str(result.checkpoint)}
        _json.write("train", run=str(run), **fields)
    else:
        loss = "" if result.best_loss is None else f"best loss {result.best_loss:.4f} at "
        step = result.step if result.best_step is None else result.best_step
        click.echo(f"{loss}step {step}; last checkpoint: {result.checkpoint}", err=True)
    if result.signal is not None:
        if not _RANK:
            click.echo(f"Stopped early. Continue with: lmhead train --resume {run}", err=True)
        raise SystemExit(128 + result.signal)


@contextmanager
def _reported_by_rank_0() -> Iterator[None]:
    """Exit without a message on the other ranks of torchrun: all of them meet the same error."""
    try:
        yield
    except click.ClickException as error:
        if _RANK and type(error.__cause__).__name__ != "LostRankError":
            raise SystemExit(error.exit_code) from error
        raise


def _call(work: Callable[[Any], Any]) -> Any:
    """Load torch and run the work; turn its errors into messages with an exit code."""
    with importing():
        from lmhead import train

        import_module("lmhead.train.run_folder")  # loads torch
        from lmhead.parallel.process_ranks import LostRankError
    try:
        return work(train)
    except train.CorpusError as error:
        raise FileError(str(error)) from error
    except (train.TrainError, LostRankError) as error:
        raise click.ClickException(str(error)) from error
