"""SFT and GRPO steps of TRL's trainers, stock and with `lmhead.integrations.trl.patch()`.

Each measurement is a process of its own, forked from one that has imported TRL and done nothing
else: a Llama with few layers and the vocabulary of Qwen 2.5, a short step that loads and allocates
what stays (weights, gradients), then one step of the body alone and one of the trainer. The memory
of the head is the growth of the resident memory at the peak of the step, without the gradient of
the head's weight. Loss and gradient must agree with stock TRL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.fresh_process import RETURN_FREED_MEMORY
from benchmarks.machine import ROOT
from benchmarks.report import MIB, Columns, Document
from benchmarks.runner import Run, benchmark, integer
from lmhead.cli._peak_memory import call_with_growth

TRAINERS = ("sft", "grpo")
RESULT = "result: "  # begins the line of a result; libraries print lines, too
MEMORY_GOAL, TIME_GOAL, AGREEMENT = 0.25, 0.8, 1e-4


@dataclass(frozen=True)
class Size:
    """Of the model and of a batch."""

    vocab: int = 151_936
    hidden: int = 896
    layers: int = 1
    batch: int = 4
    length: int = 512


def measure(trainer: str, ways: list[str], size: Size, threads: int) -> list[dict[str, float]]:
    """Return time, memory, loss and gradient norm of a step in each way, from fresh processes."""
    arguments = json.dumps([trainer, ways, asdict(size), threads])
    code = f"from benchmarks.trl_steps import main; main(*__import__('json').loads({arguments!r}))"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **RETURN_FREED_MEMORY, **environment},
    )
    if done.returncode:
        raise click.ClickException(f"{trainer}: {done.stderr.strip().splitlines()[-1:]}")
    lines = done.stdout.splitlines()
    return [json.loads(line.removeprefix(RESULT)) for line in lines if line.startswith(RESULT)]


def main(trainer: str, ways: list[str], size: dict[str, int], threads: int) -> None:
    """Fork a process for each way, which measures and prints the result."""
    warnings.simplefilter("ignore")
    import datasets  # noqa: F401
    import transformers  # noqa: F401
    import trl

    assert trl.SFTTrainer  # loads it
    for way in ways:
        child = os.fork()
        if child == 0:
            measure_way(trainer, way, size, threads)
            return
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(abs(code))  # the child has printed why


def measure_way(trainer: str, way: str, size: dict[str, int], threads: int) -> None:
    """Measure in this process and print the result."""
    torch.set_num_threads(threads)
    shape = Size(**size)
    if way != "stock":
        from lmhead.integrations.trl import patch

        patch(grad_filter=0.02 if way == "lmhead-filter" else None)
    model = make_model(shape)
    step = {"sft": sft_step, "grpo": grpo_step}[trainer](model)
    step(shape.batch, 16)  # gradients exist from here on

    def body() -> None:
        ids = torch.randint(3, shape.vocab, (shape.batch, shape.length))
        model.model(ids).last_hidden_state.square().mean().backward()

    results: dict[str, float] = {}
    for name, call in (("body", body), ("step", lambda: step(shape.batch, shape.length))):
        model.zero_grad(set_to_none=False)
        torch.manual_seed(1)
        start, wall = time.process_time(), time.perf_counter()
        loss, growth = call_with_growth(call)
        results[f"{name}_cpu_seconds"] = time.process_time() - start
        results[f"{name}_seconds"] = time.perf_counter() - wall
        results[f"{name}_growth"] = growth
    results["gradient"] = model.lm_head.weight.nbytes
    results["loss"] = float(loss or 0.0)
    results["gradient_norm"] = float(model.lm_head.weight.grad.norm())
    print(f"\n{RESULT}{json.dumps(results)}", flush=True)


def make_model(size: Size) -> Any:
    """Return a random Llama with an untied head, peaked as a trained one is."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 4,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64 or 1,
        num_key_value_heads=2 if size.hidden >= 128 else 1,
        max_position_embeddings=max(64, size.length),
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(5.0)
    return model


def _tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = ["<pad>", "<s>", "</s>", "a", "b"]
    cut = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="a")
    )
    cut.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=cut, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="a"
    )


def _options() -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(prefix="lmhead-bench-"),
        "per_device_train_batch_size": 4,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def sft_step(model: Any) -> Callable[[int, int], Tensor]:
    """Return a function that makes one step of the SFT trainer on random tokens."""
    import datasets
    import trl

    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**_options()),
        train_dataset=datasets.Dataset.from_list([{"text": "a b a b"}] * 4),
        processing_class=_tokenizer(),
    )

    def step(batch: int, length: int) -> Tensor:
        ids = torch.randint(3, model.config.vocab_size, (batch, length))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        items = torch.tensor(batch * (length - 1))
        return trainer.training_step(model, inputs, items)  # type: ignore[no-any-return]

    return step


def grpo_step(model: Any) -> Callable[[int, int], Tensor]:
    """Return a function that makes one step of the GRPO trainer on given completions.

    A quarter of the positions is the prompt. Tokens are not generated here.
    """
    import datasets
    import trl

    trainer = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(**_options(), num_generations=2),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a b"}] * 4),
        processing_class=_tokenizer(),
    )
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.current_gradient_accumulation_steps = 1

    def step(batch: int, length: int) -> Tensor:
        ids = torch.randint(3, model.config.vocab_size, (batch, length))
        prompt, completion = ids[:, : length // 4], ids[:, length // 4 :]
        inputs = {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": completion,
            "completion_mask": torch.ones_like(completion),
            "advantages": torch.linspace(-1, 1, batch),
            "num_items_in_batch": torch.tensor(completion.numel()),
        }
        return trainer.training_step(model, inputs, None)  # type: ignore[no-any-return]

    return step


def lines(document: Document, width: int) -> list[str]:
    """Return the table."""
    rows = document["results"]
    columns: Columns = [("", [f"{r['trainer']}, {r['way']}" for r in rows])]
    columns.append(("step s", [f"{r['step_cpu_seconds']:.1f}" for r in rows]))
    columns.append(("ratio", [f"{r['time_ratio']:.2f}" for r in rows]))
    columns.append(("head MiB", [f"{r['head_growth'] / MIB:,.0f}" for r in rows]))
    columns.append(("ratio", [f"{r['memory_ratio']:.2f}" for r in rows]))
    columns.append(("body s", [f"{r['body_cpu_seconds']:.1f}" for r in rows]))
    size = document["size"]
    return [
        f"V {size['vocab']}, D {size['hidden']}, {size['layers']} layers, "
        f"{size['batch']} x {size['length']} tokens, float32",
        "",
        *report.table(columns, width),
        "",
        "step: CPU seconds of a whole step, ratio to stock TRL. head: peak growth of the process",
        "in a step, without the gradient of the weight; activations of the body are in it.",
        f"Goals for lmhead: time at most {TIME_GOAL}, memory at most {MEMORY_GOAL} of stock.",
    ]


@benchmark("trl-steps", "a step of TRL's trainers, in fresh processes", lines, quick=True)
@click.option("--trainer", "trainers", multiple=True, type=click.Choice(TRAINERS), help="Trainer.")
@integer("--hidden", Size.hidden, "Hidden size.")
@integer("--layers", Size.layers, "Layers of the body.")
@click.option("--grad-filter", is_flag=True, help="Measure the gradient filter, too.")
def command(
    run: Run, trainers: tuple[str, ...], hidden: int, layers: int, grad_filter: bool
) -> None:
    """Measure SFT and GRPO steps of TRL, stock and patched: time and memory.

    Ends with 1 if a loss or gradient differs or, without --quick, a goal is missed.

    \b
    Examples:
      lmhead bench trl-steps --threads 1
      lmhead bench trl-steps --trainer sft --quick
    """
    size = Size(hidden=hidden, layers=layers)
    if run.quick:
        size = Size(vocab=4096, hidden=64, layers=1, batch=2, length=64)
    rows: list[dict[str, Any]] = []
    run.document |= {"size": asdict(size), "results": rows}
    for trainer in trainers or TRAINERS:
        run.progress(trainer)
        ways = ["stock", "lmhead", *(["lmhead-filter"] if grad_filter else [])]
        measured = measure(trainer, ways, size, run.document["threads"])
        stock: dict[str, Any] = {}
        result: dict[str, Any]
        for way, result in zip(ways, measured, strict=True):
            result["head_growth"] = max(result["step_growth"] - result["gradient"], 1)
            stock = stock or result
            result["time_ratio"] = result["step_cpu_seconds"] / stock["step_cpu_seconds"]
            result["memory_ratio"] = result["head_growth"] / stock["head_growth"]
            rows.append({"trainer": trainer, "way": way, **result})
            close = [_close(result[k], stock[k], way) for k in ("loss", "gradient_norm")]
            slow = result["time_ratio"] > TIME_GOAL or result["memory_ratio"] > MEMORY_GOAL
            missed = way == "lmhead" and slow and not run.quick
            run.wrong = run.wrong or not all(close) or missed


def _close(value: float, expected: float, way: str) -> bool:
    tolerance = 0.02 if way == "lmhead-filter" else AGREEMENT
    return abs(value - expected) <= tolerance * max(abs(expected), 1e-3)
