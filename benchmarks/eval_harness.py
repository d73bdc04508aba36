"""lm-evaluation-harness: `hf` and `lmhead` on the same requests, in fresh processes.

A random Llama with V = 151,936; batches of 8; contexts of 120 tokens and continuations of 8. Memory
is the peak of the process above what it has after opening the model. The log-likelihoods of both
must agree to 1e-3.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.report import MIB, Document
from benchmarks.runner import Run, benchmark
from lmhead.cli._peak_memory import call_with_growth

VOCAB, HIDDEN, LAYERS, BATCH = 151_936, 256, 2, 8
CONTEXT, CONTINUATION = 120, 8
BACKENDS = ("hf", "lmhead")
GOAL_MEMORY, GOAL_TIME = 0.5, 1.0


def write_model(folder: Path) -> None:
    """Write a random Llama with a large vocabulary, and a tokenizer of bytes."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=4 * HIDDEN, bos_token_id=1,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, eos_token_id=2,
        max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    names = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer: Any = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def run_backend(backend: str, folder: str, count: int, threads: int) -> dict[str, Any]:
    """Answer the requests; return seconds, bytes above the opened model, and the answers."""
    import random

    import torch
    from lm_eval.api.instance import Instance

    torch.set_num_threads(threads)
    lm: Any
    if backend == "hf":
        from lm_eval.models.huggingface import HFLM

        lm = HFLM(pretrained=folder, batch_size=BATCH, device="cpu", dtype="float32")
    else:
        from lmhead.integrations.lm_eval import LMHeadLM

        lm = LMHeadLM(folder, batch_size=BATCH)
    rng = random.Random(0)

    def text(size: int) -> str:
        return "".join(rng.choice("abcdefghij klmnop") for _ in range(size - 1)) + "."

    requests = [
        Instance(
            request_type="loglikelihood",
            doc={},
            arguments=(text(CONTEXT), " " + text(CONTINUATION - 1)),
            idx=0,
        )
        for _ in range(count)
    ]
    lm.loglikelihood(requests[:1], disable_tqdm=True)
    start = time.process_time()
    answers = lm.loglikelihood(requests, disable_tqdm=True)
    seconds = time.process_time() - start
    _, peak = call_with_growth(lambda: lm.loglikelihood(requests, disable_tqdm=True))
    return {"backend": backend, "seconds": seconds, "bytes": peak, "answers": answers}


def measure(backend: str, folder: Path, count: int, threads: int) -> dict[str, Any]:
    """Run a backend in a fresh process."""
    call = json.dumps([backend, str(folder), count, threads])
    code = (
        "import json, sys; from benchmarks.eval_harness import run_backend\n"
        f"print('RESULT' + json.dumps(run_backend(*json.loads({call!r}))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.split("RESULT")[-1])
    return result


def lines(document: Document, width: int) -> list[str]:
    """Return the table."""
    rows = document["results"]
    columns = [
        ("backend", [r["backend"] for r in rows]),
        ("CPU seconds", [f"{r['seconds']:.2f}" for r in rows]),
        ("peak MiB above the model", [f"{r['bytes'] / MIB:,.0f}" for r in rows]),
    ]
    ratios = f"memory {document['memory']:.3f} (goal {GOAL_MEMORY}), time {document['time']:.2f}"
    return [*report.table(columns, width), "", f"lmhead / hf: {ratios} (goal {GOAL_TIME:g})"]


@benchmark(
    "eval-harness", f"log-likelihoods of lm-evaluation-harness at V = {VOCAB:,}, batch 8", lines
)
def command(run: Run) -> None:
    """Compare lmhead and hf in lm-evaluation-harness: time, memory, log-likelihoods.

    Ends with 1 if log-likelihoods differ or a goal is missed.
    """
    import torch

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        results = []
        for backend in BACKENDS:
            run.progress(backend)
            results.append(measure(backend, folder, 32, torch.get_num_threads()))
    theirs, ours = (result.pop("answers") for result in results)
    error = max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True))
    greedy = all(a[1] == b[1] for a, b in zip(ours, theirs, strict=True))
    memory = results[1]["bytes"] / results[0]["bytes"]
    seconds = results[1]["seconds"] / results[0]["seconds"]
    run.document |= {"results": results, "memory": memory, "time": seconds, "error": error}
    met = memory <= GOAL_MEMORY and seconds <= GOAL_TIME
    run.wrong = error > 1e-3 or not greedy or not met
