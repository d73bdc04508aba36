"""Throughput of `lmhead serve`: 1, 4 and 16 requests at once, and a loop of `generate`.

SmolLM2-135M, sampled with seeds, every request by OpenAI's client over HTTP. The texts of all must
be those of the loop, which generates one after the other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks import report
from benchmarks.report import Document
from benchmarks.runner import Run, benchmark
from lmhead import Sampler, generate, open_model
from lmhead.models import LanguageModel

TOKENS = 32
COUNTS = (1, 4, 16)
PROMPTS = ["The capital of France is", "Once upon a time there was", "Water boils at", "In 1900"]
GOAL = 2.0  # times the loop, at 16 requests


@contextmanager
def served(model: LanguageModel) -> Iterator[str]:
    """Yield the address of a server."""
    import uvicorn

    from lmhead.server import create_api_app
    from lmhead.server.launch import bind, server_config

    listener = bind("127.0.0.1", 0)
    host = f"127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(server_config(create_api_app({"m": model}, hosts={host}), None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
        yield f"http://{host}/v1"
    finally:
        server.should_exit = True
        thread.join()


async def ask(address: str, count: int) -> list[str]:
    """Return the texts of some requests at once."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:

        async def one(seed: int) -> str:
            found = await client.completions.create(
                model="m",
                prompt=PROMPTS[seed % len(PROMPTS)],
                max_tokens=TOKENS,
                seed=seed,
                extra_body={"ignore_eos": True},
            )
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


def lines(document: Document, width: int) -> list[str]:
    """Return the table."""
    rows = document["results"]
    columns = [
        ("requests at once", [str(r["count"]) for r in rows]),
        ("serve, tokens/s", [f"{r['serve']:.1f}" for r in rows]),
        ("loop, tokens/s", [f"{r['loop']:.1f}" for r in rows]),
        ("ratio", [f"{r['ratio']:.2f}" for r in rows]),
        ("texts", ["same" if r["same"] else "DIFFERENT" for r in rows]),
    ]
    return report.table(columns, width)


@benchmark("serve-throughput", "requests at once against a loop of generate, smollm2", lines)
def command(run: Run) -> None:
    """Time requests at once against a loop of generate.

    In CPU time. Ends with 1 if a text differs or the goal is missed.
    """
    model = open_model("smollm2")
    results: list[dict[str, Any]] = []
    run.document |= {"results": results, "tokens": TOKENS, "goal": GOAL}
    with served(model) as address:
        asyncio.run(ask(address, 1))
        for count in COUNTS:
            run.progress(f"{count} at once")
            start = time.process_time()
            texts = asyncio.run(ask(address, count))
            middle = time.process_time()
            same = texts == loop(model, count)
            end = time.process_time()
            serve, plain = middle - start, end - middle
            rates = {"serve": count * TOKENS / serve, "loop": count * TOKENS / plain}
            results.append({"count": count, **rates, "ratio": plain / serve, "same": same})
    run.wrong = not all(r["same"] for r in results) or results[-1]["ratio"] < GOAL
