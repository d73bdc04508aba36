"""Five steps of each TRL trainer on a tiny random model, for the tests to compare."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from zoo.tiny_llama import tokenizer

from integrations.tiny_hf import tiny, transformers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", reason="trl is not installed (extra: clients)")
    gkd = pytest.importorskip("trl.experimental.gkd")
    import datasets

STEPS = 5
COMMON: dict[str, Any] = {
    "max_steps": STEPS,
    "per_device_train_batch_size": 2,
    "learning_rate": 2e-4,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "seed": 0,
}
# Times and speeds differ from run to run.
TIMED = ("runtime", "per_second", "step_time", "flos", "mfu", "profiling", "time")


def words(*ids: int) -> str:
    return " ".join(f"t{i % 60 + 4}" for i in ids)


def rows(make: Callable[[int, int], dict[str, Any]], n: int) -> Any:
    return datasets.Dataset.from_list([make(i, n) for i in range(8)])


# Rows of data: number i, with n tokens that count.


def text(i: int, n: int) -> dict[str, Any]:
    return {"text": words(*range(i, i + 2 * n + 2, 2))}


def pair(i: int, n: int) -> dict[str, Any]:
    return {
        "prompt": words(i, 2 * i),
        "chosen": " " + words(*range(i, i + n)),
        "rejected": " " + words(*range(3 * i + 7, 3 * i + 7 + n + i % 2)),
    }


def judged(i: int, n: int) -> dict[str, Any]:
    return {
        "prompt": words(i, 2 * i),
        "completion": " " + words(*range(i, i + n + i % 3)),
        "label": i % 2 == 0,
    }


def prompt(i: int, _: int) -> dict[str, Any]:
    return {"prompt": words(i, i + 1)}


def chat(i: int, n: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": words(i, i + 1)},
            {"role": "assistant", "content": words(*range(i, i + n))},
        ]
    }


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a reward in which no two completions tie."""
    return [sum(int(word[1:]) for word in text.split()) / 60 for text in completions]


def chat_tokenizer() -> Any:
    tokenizer_copy = copy.deepcopy(tokenizer())
    tokenizer_copy.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] + ' ' }}{% endgeneration %}{% else %}{{ m['content'] + ' ' }}{% endif %}"
        "{% endfor %}"
    )
    return tokenizer_copy


@dataclass(frozen=True)
class Kind:
    """How to make one trainer."""

    trainer: Callable[[], Any]
    config: Callable[[], Any]
    data: Callable[[int, int], dict[str, Any]]
    options: dict[str, Any]
    extra: Callable[[], dict[str, Any]] = dict  # more arguments of the trainer
    score: bool = False  # a model with one output
    template: bool = False


RL = {"num_generations": 2, "max_completion_length": 6, "temperature": 0.9, "beta": 0.1}
KINDS = {
    "sft": Kind(lambda: trl.SFTTrainer, lambda: trl.SFTConfig, text, {"max_length": 32}),
    "sft dft": Kind(
        lambda: trl.SFTTrainer,
        lambda: trl.SFTConfig,
        text,
        {"max_length": 32, "loss_type": "dft", "gradient_accumulation_steps": 2},
    ),
    "dpo": Kind(lambda: trl.DPOTrainer, lambda: trl.DPOConfig, pair, {}),
    "dpo wpo": Kind(lambda: trl.DPOTrainer, lambda: trl.DPOConfig, pair, {"use_weighting": True}),
    "kto": Kind(lambda: trl.KTOTrainer, lambda: trl.KTOConfig, judged, {}),
    "grpo": Kind(
        lambda: trl.GRPOTrainer,
        lambda: trl.GRPOConfig,
        prompt,
        {**RL, "num_iterations": 2, "entropy_coef": 0.01},
        lambda: {"reward_funcs": reward},
    ),
    "rloo": Kind(
        lambda: trl.RLOOTrainer,
        lambda: trl.RLOOConfig,
        prompt,
        RL,
        lambda: {"reward_funcs": reward},
    ),
    "distillation": Kind(
        lambda: trl.DistillationTrainer,
        lambda: trl.DistillationConfig,
        prompt,
        {"max_completion_length": 6, "beta": 0.5, "temperature": 0.9},
        lambda: {"teacher_model": None},
    ),
    "gkd": Kind(
        lambda: gkd.GKDTrainer,
        lambda: gkd.GKDConfig,
        chat,
        {"max_new_tokens": 4, "max_length": 32, "lmbda": 0.5},
        lambda: {"teacher_model": None},
        template=True,
    ),
    "reward": Kind(
        lambda: trl.RewardTrainer,
        lambda: trl.RewardConfig,
        pair,
        {},
        score=True,
    ),
}


def scorer() -> Any:
    """A model with one output in place of the vocabulary."""
    torch.manual_seed(0)
    config = copy.deepcopy(tiny().config)
    config.num_labels = 1
    return transformers.LlamaForSequenceClassification(config)


@dataclass
class Run:
    """Results of a training run."""

    logs: list[dict[str, float]]
    weights: dict[str, Any]
    model: Any


def train(
    name: str,
    folder: Path,
    *,
    make: Callable[..., Any] = tiny,
    prepare: Callable[[Any], Any] = lambda model: model,
    length: int = 5,
    **more: Any,
) -> Run:
    """Train for five steps.

    `make` gives the model, `prepare` changes it before the trainer sees it, `length` is the number
    of tokens that count in a sequence, `more` are arguments of the trainer; options={...} are those
    of its configuration.
    """
    kind = KINDS[name]
    extra = {**kind.extra(), **more}
    options = {**COMMON, **kind.options, **extra.pop("options", {})}
    if "max_completion_length" in options:
        options["max_completion_length"] = length
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = scorer() if kind.score else make()
        model.save_pretrained(folder / "base")  # trainers read the reference model from there
        model.config._name_or_path = str(folder / "base")
        if "teacher_model" in extra:
            extra["teacher_model"] = prepare(make(sharpness=8.0))
        torch.manual_seed(0)
        trainer = kind.trainer()(
            model=prepare(model),
            args=kind.config()(output_dir=str(folder), **options),
            train_dataset=rows(kind.data, length),
            processing_class=chat_tokenizer() if kind.template else tokenizer(),
            **extra,
        )
        trainer.train()
    logs = [
        {key: value for key, value in entry.items() if not any(t in key for t in TIMED)}
        for entry in trainer.state.log_history
    ]
    weights = {n: p.detach() for n, p in trainer.model.named_parameters()}
    return Run(logs, weights, trainer.model)
