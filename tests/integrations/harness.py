"""Run the local tasks of examples/eval with any model class of lm-evaluation-harness."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import hf_folders

os.environ["HF_DATASETS_OFFLINE"] = "1"
lm_eval: Any = pytest.importorskip("lm_eval")

TASKS = Path(__file__).resolve().parents[2] / "examples" / "eval"
NAMES = ["lmhead_choice", "lmhead_generation", "lmhead_rolling"]


def write_folder(folder: Path, family: str, **changes: Any) -> Path:
    """A random Hugging Face folder that the harness's own `hf` opens too."""
    hf_folders.write(folder, family, **changes)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def run(model: Any, names: list[str] = NAMES, **options: Any) -> Any:
    """The harness's results for a model."""
    tasks: Any = pytest.importorskip("lm_eval.tasks")
    manager = tasks.TaskManager(include_path=str(TASKS), include_defaults=False)
    return lm_eval.simple_evaluate(
        model, tasks=names, task_manager=manager, bootstrap_iters=0, verbosity=None, **options
    )


def answers(results: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every answer of the model: the task, a number or a text, and whether it is greedy."""
    for task in sorted(results["samples"]):
        for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"]):
            for answer in sample["filtered_resps"]:
                if isinstance(answer, tuple | list):
                    yield task, answer[0], answer[1]
                else:
                    yield task, answer, None


def metrics(results: Any) -> dict[tuple[str, str], float]:
    return {
        (task, name): value
        for task, values in results["results"].items()
        for name, value in values.items()
        if isinstance(value, float)
    }


def assert_same(ours: Any, theirs: Any, *, tolerance: float = 1e-3) -> None:
    """The same answers: log-likelihoods to 1e-3, texts and metrics equal."""
    pairs = list(zip(answers(ours), answers(theirs), strict=True))
    assert len(pairs) >= 8
    for (task, a, greedy_a), (_, b, greedy_b) in pairs:
        if isinstance(a, str):
            assert a == b, task
        else:
            assert abs(a - b) < tolerance, (task, a, b)
            assert greedy_a == greedy_b, task
    our_metrics, their_metrics = metrics(ours), metrics(theirs)
    assert our_metrics.keys() == their_metrics.keys()
    for key, value in our_metrics.items():
        # Perplexities follow from log-likelihoods to 1e-3; counts of right answers are equal.
        limit = 1e-3 * max(1.0, abs(their_metrics[key])) if "perplexity" in key[1] else 1e-4
        assert abs(value - their_metrics[key]) <= limit, key
