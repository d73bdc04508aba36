"""`lmhead train`: a model from text files. Its options are the fields of `TrainConfig`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import click

from lmhead.train.config import MAY_CHANGE, PRESETS, TrainConfig, make_config, option_name


class _Grouped(click.Command):
    """A command whose help shows the options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Run": []}
        headings = {field.name: field.metadata["group"] for field in _fields()}
        for parameter in self.get_params(ctx):
            if isinstance(parameter, click.Argument):
                continue
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(headings.get(str(parameter.name), "Run"), []).append(record)
        for heading, records in groups.items():
            with formatter.section(f"{heading} options"):
                formatter.write_dl(records)


def _fields() -> Iterator[dataclasses.Field[Any]]:
    return (field for field in dataclasses.fields(TrainConfig) if field.name != "corpus")


def _settings(command: Callable[..., Any]) -> Callable[..., Any]:
    """An option for each field; None where it was not given."""
    types = get_type_hints(TrainConfig)
    for field in reversed(list(_fields())):
        facts, kind = field.metadata, types[field.name]
        name = option_name(field.name)
        shown = json.dumps(field.default, ensure_ascii=False).strip('"')
        if kind is bool:
            shown = name if field.default else f"no-{name}"
            spelling, kind = f"--{name}/--no-{name}", None
        else:
            spelling = f"--{name}"
        command = click.option(
            spelling,
            field.name,
            type=click.Choice(facts["choices"]) if facts["choices"] else kind,
            default=None,
            help=f"{facts['help']}  [{shown}]",
        )(command)
    return command


@click.command("train", cls=_Grouped)
@click.argument("corpus", nargs=-1, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run.")
@click.option(
    "--resume",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Go on with the run in this folder; only "
    + ", ".join(f"--{option_name(name)}" for name in MAY_CHANGE)
    + " may be given as well.",
)
@click.option(
    "--preset", type=click.Choice(list(PRESETS)), help="Settings that fit together; options win."
)
@click.option(
    "--config",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML file with the options below as keys; options win.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
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
      lmhead train *.txt --out run --tokenizer words --vocab-size 20000 --grad-filter 0.02
      lmhead train --config run.toml --out run
      lmhead train --resume run
      lmhead train --resume run --steps 5000
      lmhead generate run "ROMEO:"
    """  # noqa: D301
    given = {name: value for name, value in options.items() if value is not None}
    if (out is None) == (resume is None):
        raise click.UsageError("give --out FOLDER for a new run, or --resume FOLDER to go on")
    try:
        if resume is not None:
            if corpus or preset or file:
                raise click.UsageError("--resume takes corpus and settings from the run")
            result = _run(lambda train: train.resume(resume, given))
        else:
            if corpus:
                given["corpus"] = [str(path) for path in corpus]
            config = make_config(given, preset=preset, file=file)
            result = _run(lambda train: train.train(config, out))
    except (ValueError, TypeError) as error:
        raise click.UsageError(str(error)) from None
    _finish(result, resume or out, as_json)


def _run(work: Callable[[Any], Any]) -> Any:
    """Call the room that loads torch; what it cannot do is told in a line."""
    from lmhead import train

    try:
        return work(train)
    except train.CorpusError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(3) from None
    except train.TrainError as error:
        raise click.ClickException(str(error)) from None


def _finish(result: Any, run: Path | None, as_json: bool) -> None:
    if as_json:
        facts = dataclasses.asdict(result)
        click.echo(json.dumps({"schema": "lmhead.train/1", **facts}, default=str, indent=2))
    else:
        loss = "" if result.best_loss is None else f", best loss {result.best_loss:.4f}"
        at = "" if result.best_step is None else f" at step {result.best_step}"
        click.echo(f"step {result.step}{loss}{at}: {result.checkpoint}", err=True)
    if result.signal is not None:
        click.echo(f"Stopped early. Go on with: lmhead train --resume {run}", err=True)
        raise SystemExit(128 + result.signal)
