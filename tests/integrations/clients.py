"""Programs of other packages, with and without lmhead: their results and largest tensors.

`PYTHONPATH=tests python -m integrations.clients` writes the table of docs/integrations.md.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch_watch import Allocations
from zoo.tiny_llama import tokenizer

import lmhead
from integrations.tiny_hf import WIDE_VOCAB, transformers, wide
from integrations.trl_runs import train
from lmhead.integrations.trl import patch

accelerate = pytest.importorskip("accelerate")
MAX_BYTES = 2**14  # so that no tile is as large as the logits of a tiny model
BATCH, LENGTH = 4, 12
TOKENS = BATCH * LENGTH
TIMED = ("time", "per_second", "flos", "compilation", "memory")


class Ids(torch.utils.data.Dataset[dict[str, Any]]):
    """Sequences of token ids with labels, the first of them ignored."""

    def __init__(self, n: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(4, WIDE_VOCAB, (n, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        labels = self.ids[i].clone()
        labels[:2] = -100
        return {"input_ids": self.ids[i], "labels": labels}


def trainer(model: Any, **options: Any) -> Any:
    arguments: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "max_steps": 3,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    more = {name: options.pop(name) for name in list(options) if name in _OF_TRAINER}
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**{**arguments, **options}),
        train_dataset=Ids(),
        eval_dataset=Ids(8),
        **more,
    )


_OF_TRAINER = ("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func")


def trained(**options: Any) -> Callable[[Any], Any]:
    """Return a program that trains for three steps and returns losses and weights."""

    def run(model: Any) -> Any:
        made = trainer(model, **options)
        made.train()
        logs = [entry.get("loss") for entry in made.state.log_history]
        return [x for x in logs if x is not None], [p.detach() for p in model.parameters()]

    return run


def evaluated(**options: Any) -> Callable[[Any], Any]:
    """Return a program that evaluates and returns the metrics."""

    def run(model: Any) -> Any:
        found = trainer(model, **options).evaluate()
        return {k: v for k, v in found.items() if not any(t in k for t in TIMED)}

    return run


def predicted(model: Any) -> Any:
    out = trainer(model).predict(Ids(8))
    return torch.from_numpy(out.predictions), out.metrics["test_loss"]


def accuracy(found: Any) -> dict[str, float]:
    """Return the accuracy of logits, or of predicted ids."""
    guesses = torch.from_numpy(found.predictions)
    guesses = guesses.argmax(-1) if guesses.dim() == 3 else guesses
    labels = torch.from_numpy(found.label_ids)[:, 1:]
    hits = (guesses[:, :-1] == labels)[labels != -100]
    return {"accuracy": float(hits.float().mean())}


def guess(logits: Any, labels: Any) -> Any:  # noqa: ARG001
    return logits.argmax(-1)


def soft_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """Return a loss that a user might write: focal cross-entropy."""
    log_p = outputs.logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    picked = log_p.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    losses = -((1 - picked.exp()) ** 2) * picked
    return losses[targets != -100].sum() / (num_items_in_batch or 1)


PROMPT = Ids(3).ids[:, :6]


def generated(rows: int = 3, **options: Any) -> Callable[[Any], Any]:
    """Return a program that generates with given options."""
    prompt = PROMPT[:rows]

    def run(model: Any) -> Any:
        torch.manual_seed(0)
        extra = {name: make() for name, make in options.items() if callable(make)}
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            pad_token_id=0,
            eos_token_id=None,
            **{**options, **extra},
        )
        if isinstance(out, torch.Tensor):
            return out
        tensors = [out.sequences]
        for name in ("scores", "logits"):
            tensors += list(getattr(out, name, None) or ())
        return [t if t.is_floating_point() is False else torch.nan_to_num(t) for t in tensors]

    return run


class Halve(transformers.LogitsProcessor):  # type: ignore[misc]
    """A processor of a user: writes to some scores and scales the rest."""

    def __call__(self, ids: Any, scores: Any) -> Any:  # noqa: ARG002
        scores = scores / 2
        scores[:, 10:20] = -float("inf")
        return scores


def piped(model: Any) -> Any:
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer())
    out = pipe("t5 t9 t8", max_new_tokens=5, do_sample=False, return_full_text=False)
    return torch.tensor([len(out[0]["generated_text"]), *out[0]["generated_text"].encode()])


def accelerated(**options: Any) -> Callable[[Any], Any]:
    """Return a training loop written with accelerate."""

    def run(model: Any) -> Any:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        made = accelerate.Accelerator(cpu=True, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(Ids(), batch_size=BATCH)
        model, optimizer, loader = made.prepare(model, optimizer, loader)
        losses = []
        for batch in loader:
            with made.accumulate(model):
                loss = model(**batch).loss
                made.backward(loss)
                made.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(made.gather_for_metrics(loss.detach()).mean()))
        return losses, [p.detach() for p in model.parameters()]

    return run


def adapted(**options: Any) -> Callable[[Any], Any]:
    """Return a program that trains PEFT adapters."""

    def run(model: Any) -> Any:
        peft = pytest.importorskip("peft")
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, **options))
        losses, weights = trained(learning_rate=1e-2)(model)
        return losses, weights, model.merge_and_unload()(Ids().ids[:2]).logits.logsumexp(-1)

    return run


@dataclass(frozen=True)
class Client:
    """A program as it is and with lmhead.

    `tokens` is the number of positions it scores at once, `tolerance` is wider for numbers that are
    rounded to half precision on the way, `builds` says that the program itself needs all logits.
    """

    group: str
    name: str
    stock: Callable[[], Any]
    ours: Callable[[], Any]
    tokens: int = TOKENS
    tolerance: float = 1e-5
    builds: bool = False


def on(group: str, name: str, run: Callable[[Any], Any], **more: Any) -> Client:
    """Return the client of a function of a model."""
    return Client(
        group,
        name,
        lambda: run(wide().train()),
        lambda: run(lmhead.replace_head(wide().train(), max_bytes=MAX_BYTES)),
        **more,
    )


def trl(name: str, sequences: int) -> Client:
    """Return the client of one of TRL's trainers."""

    def run(prepare: Callable[[Any], Any]) -> Any:
        options = {"max_steps": 2, **({"lmbda": 0.0} if name == "gkd" else {})}
        with tempfile.TemporaryDirectory() as folder:
            found = train(
                name, Path(folder), make=wide, prepare=prepare, length=20, options=options
            )
        losses = [entry["loss"] for entry in found.logs if "loss" in entry]
        return losses, list(found.weights.values())

    def ours() -> Any:
        if name == "gkd":  # computes from logits: replace the head
            return run(lambda model: lmhead.replace_head(model, max_bytes=MAX_BYTES))
        with patch(max_bytes=MAX_BYTES):
            return run(lambda model: model)

    shown = {"gkd": "GKD (`replace_head`)", "distillation": "distillation"}.get(name, name.upper())
    return Client("TRL", shown, lambda: run(lambda model: model), ours, tokens=20 * sequences)


def assistant() -> Any:
    return wide(sharpness=5.0)


CLIENTS = [
    on("Trainer", "training", trained()),
    on("Trainer", "label smoothing", trained(label_smoothing_factor=0.1)),
    on("Trainer", "gradient accumulation", trained(gradient_accumulation_steps=2)),
    on("Trainer", "gradient checkpointing", trained(gradient_checkpointing=True)),
    on("Trainer", "bf16 autocast", trained(bf16=True), tolerance=2e-2),
    on("Trainer", "own loss function", trained(compute_loss_func=soft_loss)),
    on("Trainer", "torch_compile", trained(torch_compile=True, torch_compile_backend="eager")),
    on("Trainer", "evaluate", evaluated()),
    on("Trainer", "evaluate, prediction_loss_only", evaluated(prediction_loss_only=True)),
    on(
        "Trainer",
        "evaluate, compute_metrics, preprocess_logits_for_metrics",
        evaluated(compute_metrics=accuracy, preprocess_logits_for_metrics=guess),
    ),
    on("Trainer", "evaluate, compute_metrics", evaluated(compute_metrics=accuracy), builds=True),
    on("Trainer", "predict", predicted, builds=True),
    on("PEFT", "LoRA on the body", adapted(target_modules=["q_proj", "v_proj"])),
    on("PEFT", "LoRA on the head", adapted(target_modules=["q_proj", "lm_head"])),
    on("PEFT", "DoRA on the head", adapted(target_modules=["lm_head"], use_dora=True)),
    on(
        "PEFT",
        "modules_to_save: head",
        adapted(target_modules=["q_proj"], modules_to_save=["lm_head"]),
    ),
    on(
        "PEFT",
        "trainable_token_indices: head",
        adapted(target_modules=["q_proj"], trainable_token_indices={"lm_head": [5, 9]}),
    ),
    on("accelerate", "training loop", accelerated()),
    on("accelerate", "accumulation", accelerated(gradient_accumulation_steps=2)),
    on("accelerate", "bf16", accelerated(mixed_precision="bf16"), tolerance=2e-2),
    on("generate", "greedy", generated(do_sample=False)),
    on("generate", "sampling", generated(do_sample=True, temperature=0.8, top_k=20)),
    on("generate", "beams", generated(do_sample=False, num_beams=3)),
    on("generate", "sampled beams", generated(do_sample=True, num_beams=3)),
    on("generate", "assisted", generated(1, do_sample=False, assistant_model=assistant)),
    on("generate", "prompt lookup", generated(1, do_sample=False, prompt_lookup_num_tokens=3)),
    on(
        "generate",
        "output_scores, output_logits",
        generated(
            do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True
        ),
    ),
    on("generate", "own processor", generated(do_sample=False, logits_processor=lambda: [Halve()])),
    on("generate", "static cache", generated(do_sample=False, cache_implementation="static")),
    on("pipeline", "text-generation", piped),
    trl("sft", 2),
    trl("dpo", 4),
    trl("kto", 2),
    trl("grpo", 2),
    trl("rloo", 2),
    trl("distillation", 2),
    trl("gkd", 2),
]


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    client: Client
    same: bool
    stock_builds: bool
    builds: bool

    def markdown(self, words: dict[str, str]) -> str:
        """Return the row in Markdown."""
        built = [words["built" if b else "not built"] for b in (self.stock_builds, self.builds)]
        cells = [self.client.group, self.client.name, words["same" if self.same else "differs"]]
        return "| " + " | ".join([*cells, *built]) + " |"


def measure(client: Client) -> Row:
    """Run a client both ways."""
    results, largest = [], []
    for run in (client.stock, client.ours):
        with warnings.catch_warnings(), Allocations() as watch:
            warnings.simplefilter("ignore")
            results.append(tree_leaves(run()))
        largest.append(watch.largest)
    limit = client.tokens * WIDE_VOCAB
    same = len(results[0]) == len(results[1]) and all(
        close(a, b, client.tolerance) for a, b in zip(*results, strict=True)
    )
    return Row(client, same, *(size >= limit for size in largest))


def close(a: Any, b: Any, tolerance: float) -> bool:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    return a.shape == b.shape and torch.allclose(
        a.double(), b.double(), rtol=tolerance, atol=tolerance
    )


PAGES = {
    "integrations.md": {
        "head": "| package | client | result | logits with `nn.Linear` | logits with lmhead |",
        "same": "the same",
        "differs": "differs",
        "built": "built",
        "not built": "not built",
    },
    "integrations.zh.md": {
        "head": "| 软件包 | 用法 | 结果 | `nn.Linear` 的 logits | lmhead 的 logits |",
        "same": "相同",
        "differs": "不同",
        "built": "生成",
        "not built": "不生成",
    },
}
DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- clients: begin -->\n", "<!-- clients: end -->\n"


def table(page: str) -> list[str]:
    """Return the rows of the table on a page."""
    lines = (DOCS / page).read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].splitlines()
    return [line for line in lines if line.startswith("|")][2:]


def write(rows: list[Row]) -> None:
    """Write the tables."""
    for page, words in PAGES.items():
        lines = [words["head"], "|---|---|---|---|---|", *(row.markdown(words) for row in rows)]
        before, rest = (DOCS / page).read_text(encoding="utf-8").split(BEGIN)
        text = before + BEGIN + "\n".join(["", *lines, "", END]) + rest.split(END)[1]
        (DOCS / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write([measure(client) for client in CLIENTS])
