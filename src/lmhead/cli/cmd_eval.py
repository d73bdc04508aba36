"""`lmhead eval`: run tasks of lm-evaluation-harness on a model."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli._command_group import FILE, FOLDER, as_usage_errors, integer_option
from lmhead.cli._model_arguments import kept, model_json, model_options, open_model
from lmhead.progress import exit_on_interrupt

if TYPE_CHECKING:
    from lmhead.models import LanguageModel

_NAME = re.compile(r"^(?:task|group): *[\"']?([^\"'#\s]+)", re.MULTILINE)


def _batch_size(ctx: Any, param: Any, value: str) -> int | str:  # noqa: ARG001
    """Return a positive integer, or "auto"."""
    if value != "auto" and not (value.isdecimal() and int(value)):
        raise click.BadParameter(f"must be a positive integer or auto; got {value}")
    return value if value == "auto" else int(value)


@click.command("eval")
@click.argument("model", required=False)
@click.option(
    "--tasks",
    required=True,
    help="Names of tasks or groups, YAML files, or folders of these; comma-separated.",
)
@click.option(
    "--limit",
    type=click.FloatRange(0, min_open=True),
    help="Examples per task; below 1, a fraction.",
)
@click.option("--num-fewshot", type=click.IntRange(0), help="Examples before each question.")
@click.option(
    "--batch-size",
    callback=_batch_size,
    default="auto",
    show_default=True,
    help="Rows of a batch; auto for as many as --max-mb allows.",
)
@integer_option(
    "--max-mb",
    default=1024,
    help="Estimated memory of an automatic batch, in MiB, besides the model.",
)
@click.option("--max-length", type=click.IntRange(1), help="Context length.  [default: model's]")
@click.option("--chat", is_flag=True, help="Apply the model's chat template to the prompts.")
@click.option("--system", help="System prompt.")
@click.option("--output", type=FILE, help="Write the harness's results to this JSON file.")
@click.option("--samples", is_flag=True, help="With --output: include every question and answer.")
@click.option(
    "--cache", type=FOLDER, help="Folder for answers; a stopped run continues with those in it."
)
@model_options
@_json.json_option
def command(
    model: str | None,
    tasks: str,
    limit: float | None,
    num_fewshot: int | None,
    batch_size: int | str,
    max_mb: int,
    max_length: int | None,
    chat: bool,
    system: str | None,
    output: Path | None,
    samples: bool,
    cache: Path | None,
    as_json: bool,
) -> None:
    """Evaluate a model on tasks of lm-evaluation-harness.

    Every model that lmhead opens can be evaluated, GGUF files included. Only the continuations of a
    task go through the head, and no logits tensor is built. Data sets that are not on this machine
    need --download. To use several processes: torchrun --nproc-per-node 2 -m lmhead eval ...

    \b
    Examples:
      lmhead eval smollm2 --tasks examples/eval
      lmhead eval smollm2 --tasks examples/eval/choice.yaml --limit 10
      lmhead eval ./model --tasks hellaswag,arc_easy --download --output results.json
      lmhead eval ./model.gguf --tasks wikitext --download --cache answers
    """
    if samples and output is None:
        raise click.UsageError("--samples needs --output.")
    if output is not None and not output.parent.is_dir():
        raise click.UsageError(f"the folder of --output must exist; {output.parent} does not.")
    if output is not None and output.exists():
        raise click.UsageError(f"{output} exists; choose another --output.")
    if find_spec("lm_eval") is None:
        raise click.ClickException("lm-eval is not installed; run: pip install 'lmhead[eval]'")
    if not kept("download"):
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    opened = open_model(model)
    if chat and opened.chat is None:
        raise click.UsageError(f"--chat needs a chat template, which {opened.name} does not have.")
    with exit_on_interrupt():
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        import lm_eval

        from lmhead.integrations.lm_eval import LMHeadLM
    with as_usage_errors():
        names, manager = find_tasks(tasks)
        evaluated = LMHeadLM(
            opened, batch_size=batch_size, max_bytes=max_mb << 20, max_length=max_length
        )
    results = lm_eval.simple_evaluate(
        evaluated,
        tasks=names,
        task_manager=manager,
        limit=int(limit) if limit is not None and limit >= 1 else limit,
        num_fewshot=num_fewshot,
        apply_chat_template=chat,
        system_instruction=system,
        log_samples=samples,
        use_cache=None if cache is None else str(cache / fingerprint(opened, model, evaluated)),
    )
    if results is None:  # not the first process of torchrun
        return
    if output is not None:
        text = json.dumps(results, indent=2, ensure_ascii=False, default=_to_json)
        output.write_text(text + "\n", encoding="utf-8")
    if as_json:
        _json.write("eval", model=model_json(opened), tasks=list(task_results(results)), lines=3)
        return
    from lm_eval.utils import make_table

    click.echo(make_table(results).rstrip())
    if results.get("groups"):
        click.echo("\n" + make_table(results, "groups").rstrip())


def find_tasks(given: str) -> tuple[list[str], Any]:
    """Return the names of tasks, and the harness's manager that knows them.

    Args:
        given: names, YAML files and folders, comma-separated.

    Raises:
        ValueError: an unknown name, or a file that is no task.
    """
    from lm_eval.tasks import TaskManager

    names: list[str] = []
    folders: list[str] = []
    registered: list[str] = []
    for part in filter(None, given.split(",")):
        path = Path(part)
        if path.is_dir() or path.suffix in (".yaml", ".yml"):
            files = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
            if not files:
                raise ValueError(f"--tasks: {part} must hold YAML files; it has none")
            names += [_name_of_task(file) for file in files]
            folders.append(str(path if path.is_dir() else path.parent))
        else:
            names.append(part)
            registered.append(part)
    manager = TaskManager(include_path=folders or None, include_defaults=bool(registered))
    for name in registered:
        if not manager.match_tasks([name]):
            raise ValueError(
                f"--tasks: there is no task {name!r}; `lm-eval ls tasks` lists them, and a task of "
                "your own is given as its YAML file"
            )
    if not names:
        raise ValueError("--tasks must name at least one task")
    return names, manager


def _name_of_task(file: Path) -> str:
    try:
        match = _NAME.search(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--tasks: {file} cannot be read: {error}") from None
    if match is None:
        raise ValueError(f"--tasks: {file} must name its task, as `task: NAME`")
    return match[1]


def fingerprint(model: LanguageModel, where: str | None, evaluated: Any) -> str:
    """Return a name for the cache of a model's answers; other files give another name."""
    facts: list[Any] = [model.name, model.head.vocab_size, evaluated.max_length]
    path = Path(where or "")
    if where is not None and path.exists():
        files = sorted(path.glob("*")) if path.is_dir() else [path]
        for file in files:
            stat = file.stat()
            facts += [str(file.resolve()), stat.st_size, stat.st_mtime_ns]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def task_results(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entries of the JSON document: one per task, with its metrics."""
    for task, values in results["results"].items():
        metrics = []
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr"):
                continue
            better = results.get("higher_is_better", {}).get(task, {}).get(metric)
            entry = {"metric": metric, "filter": filtered, "value": _finite(value)}
            error = _finite(values.get(f"{metric}_stderr,{filtered}"))
            metrics.append({**entry, "stderr": error, "higher_is_better": better})
        yield {
            "task": task,
            "version": results["versions"].get(task),
            "num_fewshot": results.get("n-shot", {}).get(task),
            "examples": results.get("n-samples", {}).get(task, {}).get("effective"),
            "metrics": metrics,
        }


def _finite(value: Any) -> float | None:
    """Return a number; None for infinities, NaN and the harness's "N/A"."""
    number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if number else None


def _to_json(value: Any) -> Any:
    """Convert NumPy numbers, tasks and functions to JSON values."""
    return value.item() if hasattr(value, "item") else str(value)
