"""`lmhead train`: a model from text files. Its options are the fields of `TrainConfig`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import click

from lmhead.cli import _json
from lmhead.cli._frame import (
    SectionedCommand,
    SectionedOption,
    Unreadable,
    options_checked,
)
from lmhead.interrupt import leaving_at_once
from lmhead.train.config import MAY_CHANGE, PRESETS, TrainConfig, make_config, option_name


def _settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each field; None where it was not given."""
    types = get_type_hints(TrainConfig)
    for field in reversed(dataclasses.fields(TrainConfig)):
        if field.name != "corpus":  # the argument
            command = _option(field, types[field.name])(command)
    return command


def _option(field: dataclasses.Field[Any], kind: Any) -> Callable[..., Any]:
    name, facts = option_name(field.name), field.metadata
    spelling, shown = f"--{name}", json.dumps(field.default, ensure_ascii=False)
    if kind is bool:
        spelling, kind = f"--{name}/--no-{name}", None
        shown = f"--{name}" if field.default else f"--no-{name}"
    elif facts["choices"]:
        kind, shown = click.Choice(facts["choices"]), str(field.default)
    return click.option(
        spelling,
        field.name,
        type=kind,
        default=None,
        help=f"{facts['help']}  [default: {shown}]",
        cls=SectionedOption,
        section=facts["group"],
    )


@click.command("train", cls=SectionedCommand)
@click.argument("corpus", nargs=-1, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run.")
@click.option(
    "--resume",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help=f"Go on with the run in this folder. Of the settings, only {', '.join(MAY_CHANGE)} may "
    "be given.".replace("_", "-"),
)
@click.option(
    "--preset", type=click.Choice(list(PRESETS)), help="Settings that fit together; options win."
)
@click.option(
    "--config",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file with the settings below as keys; options win.",
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
    """Train a language model on text files, with checkpoints that survive anything.

    The folder of a run holds its settings, checkpoints, a log in JSON lines and the loss curve.
    Ctrl-C writes a checkpoint and leaves; so does SIGTERM. After that, after kill -9 or a power
    cut, --resume goes on to the same weights, bit by bit, as a run that was never stopped.

    \b
    Examples:
      lmhead train book.txt --out run --preset cpu-small
      lmhead train input.txt --out run --preset shakespeare-char
      lmhead train *.txt --out run --tokenizer words --vocab-size 20000
      lmhead train --config run.toml --out run
      lmhead train --task translate pairs.tsv --out run
      lmhead train --resume run
      lmhead train --resume run --steps 5000
      lmhead generate run "ROMEO:"
    """
    given = {name: value for name, value in options.items() if value is not None}
    if (out is None) == (resume is None):
        raise click.UsageError("Give --out FOLDER for a new run, or --resume FOLDER to go on.")
    run = resume or out
    with options_checked():
        if resume is not None:
            if corpus or preset or file:
                raise click.UsageError("--resume takes corpus and settings from the run.")
            result = _call(lambda train: train.resume(resume, given))
        else:
            if corpus:
                given["corpus"] = [str(path) for path in corpus]
            config = make_config(given, preset=preset, file=file)
            result = _call(lambda train: train.train(config, out))
    if as_json:
        facts = dataclasses.asdict(result) | {"checkpoint": str(result.checkpoint)}
        _json.write("train", run=str(run), **facts)
    else:
        loss = "" if result.best_loss is None else f"best loss {result.best_loss:.4f} at "
        step = result.step if result.best_step is None else result.best_step
        click.echo(f"{loss}step {step}; the last checkpoint is {result.checkpoint}", err=True)
    if result.signal is not None:
        click.echo(f"Stopped early. Go on with: lmhead train --resume {run}", err=True)
        raise SystemExit(128 + result.signal)


def _call(work: Callable[[Any], Any]) -> Any:
    """Enter the room that loads torch; what cannot be done there is told in a sentence."""
    with leaving_at_once():
        from lmhead import train
        from lmhead.train import run

        assert run
    try:
        return work(train)
    except train.CorpusError as error:
        raise Unreadable(str(error)) from error
    except train.TrainError as error:
        raise click.ClickException(str(error)) from error
