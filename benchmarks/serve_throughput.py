"""Throughput of `lmhead serve` at 1, 4 and 16 requests at once, compared with two other ways.

SmolLM2-135M in float32, sampled with seeds. `lmhead serve` and `transformers serve` run in their
own processes and are asked by OpenAI's client over HTTP; the loop of `generate` runs here, one text
after the other. The texts of `lmhead serve` must be those of the loop. `transformers serve` needs
fastapi (pip install 'transformers[serving]') and is left out without it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.report import Document
from benchmarks.runner import Run, benchmark, rounds
from lmhead import Sampler, generate, open_model
from lmhead.models import LanguageModel, bundled

TOKENS = 32
COUNTS = (1, 4, 16)
PROMPTS = ["The capital of France is", "Once upon a time there was", "Water boils at", "In 1900"]
LOOP, OURS, THEIRS = "loop of generate", "lmhead serve", "transformers serve"
GOAL = 2.0  # times the others, at 16 requests


@contextmanager
def served(command: list[str], port: int, threads: int) -> Iterator[str]:
    """Run a server in a process of its own; yield its address once it answers."""
    import httpx

    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", *command, "--port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            while process.poll() is None:
                try:
                    httpx.get(f"{address}/health", timeout=60)
                    break
                except httpx.TransportError:
                    time.sleep(0.2)
            yield f"{address}/v1"
        finally:
            process.kill()


def convert(file: Path, folder: str) -> None:
    """Write a GGUF model as a folder in float32: `transformers serve` cannot open the file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: Any = {"gguf_file": file.name}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are dequantized
    plain: Any = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **given).save_pretrained(folder)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def ask(address: str, model: str, count: int, extra: dict[str, Any]) -> list[str]:
    """Return the texts of some requests at once."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0, timeout=300) as client:

        async def one(seed: int) -> str:
            found = await client.completions.create(
                model=model,
                prompt=PROMPTS[seed % len(PROMPTS)],
                max_tokens=TOKENS,
                seed=seed,
                extra_body=extra,
            )
            assert found.usage is not None
            assert found.usage.completion_tokens == TOKENS, found.usage
            return found.choices[0].text

        return await asyncio.gather(*map(one, range(count)))


def loop(model: LanguageModel, count: int) -> list[str]:
    """Return the same texts, one after the other."""
    return [
        generate(
            model,
            PROMPTS[seed % len(PROMPTS)],
            Sampler(seed=seed, order="vllm"),
            max_new_tokens=TOKENS,
            eos_token_ids=(),
        ).text
        for seed in range(count)
    ]


def measure(run: Run, ways: dict[str, Callable[[int], list[str]]], rounds: int) -> None:
    """Add the rates of each way to the document, round by round; one request is not timed."""
    for texts in ways.values():
        texts(1)
    results: list[dict[str, Any]] = [
        {"count": count, "rates": {name: [] for name in ways}, "same": True} for count in COUNTS
    ]
    run.document["results"] = results
    for number in range(rounds):
        for result in results:
            made = {}
            for name, texts in ways.items():
                run.progress(f"round {number + 1} of {rounds}: {name}, {result['count']} at once")
                start = time.perf_counter()
                made[name] = texts(result["count"])
                rate = result["count"] * TOKENS / (time.perf_counter() - start)
                result["rates"][name].append(rate)
            result["same"] = result["same"] and made[OURS] == made[LOOP]
        run.save()  # whole rounds are kept if the run is stopped


def asking(address: str, model: str, extra: dict[str, Any]) -> Callable[[int], list[str]]:
    """Return a function that sends some requests at once."""
    return lambda count: asyncio.run(ask(address, model, count, extra))


def ratio(result: dict[str, Any], name: str) -> float:
    """Return the median over the rounds of our rate divided by another."""
    pairs = zip(result["rates"][OURS], result["rates"][name], strict=False)
    return float(median(ours / other for ours, other in pairs))


def lines(document: Document, width: int) -> list[str]:
    """Return the table."""
    rows = document["results"]
    columns = [("requests at once", [str(r["count"]) for r in rows])]
    columns += [
        (f"{name}, tokens/s", [f"{median(r['rates'][name]):.1f}" for r in rows])
        for name in document["names"]
    ]
    for name in document["names"][:-1]:
        columns.append((f"/ {name}", [f"{ratio(r, name):.2f}" for r in rows]))
    columns.append(("texts", ["same" if r["same"] else "DIFFERENT" for r in rows]))
    return report.table(columns, width)


@benchmark("serve-throughput", "requests to lmhead serve at once, smollm2", lines)
@rounds(2)
def command(run: Run, rounds: int) -> None:
    """Time requests at once against a loop of generate and transformers serve.

    Ends with 1 if a text differs from that of the loop or the goal is missed.
    """
    import torch

    file = bundled.find("smollm2")
    if file is None:
        raise ValueError("smollm2 must be installed: lmhead models add smollm2")
    threads = torch.get_num_threads()
    model = open_model("smollm2")
    ways: dict[str, Callable[[int], list[str]]] = {LOOP: lambda count: loop(model, count)}
    with ExitStack() as stack:
        if find_spec("fastapi") is not None:
            run.progress(f"starting {THEIRS}")
            lengths = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
            options = {**lengths, "do_sample": True, "top_k": 0}
            place = stack.enter_context(tempfile.TemporaryDirectory())
            convert(file, place)
            command = ["transformers.cli.transformers", "serve", place, "--device", "cpu"]
            server = served([*command, "--dtype", "float32"], free_port(), threads)
            extra = {"generation_config": json.dumps(options)}
            ways[THEIRS] = asking(stack.enter_context(server), place, extra)
        server = served(["lmhead", "serve", "smollm2"], free_port(), threads)
        ways[OURS] = asking(stack.enter_context(server), "smollm2", {"ignore_eos": True})
        run.document |= {"names": list(ways), "tokens": TOKENS, "goal": GOAL}
        measure(run, ways, rounds)
    results = run.document["results"]
    met = all(ratio(results[-1], name) >= GOAL for name in ways if name != OURS)
    run.wrong = not all(r["same"] for r in results) or not met
