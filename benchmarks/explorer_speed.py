"""The web page of the next token in a browser: slider to frame, and address to first chart.

Slider: a model with V = 262,144. Every slider of the sampler is moved twenty times, alone and with
all other stages on; the time is from the event to the next frame. The numbers that the page then
shows are compared with the library's. First chart: from opening the address to ranked tokens on the
screen, in a new context of the browser, with `tiny`. Goals: medians of 50 ms and 1.5 s.

Needs Chromium, Playwright, uvicorn and the built page (`make explorer`).
"""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import torch

from benchmarks import report
from benchmarks.report import Document
from benchmarks.runner import Run, benchmark
from benchmarks.timing import Progress, summary
from lmhead import LMHead, Sampler, open_model
from lmhead.models import LanguageModel
from lmhead.nn import LlamaBody, LlamaConfig

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

VOCAB = 262_144
SLIDER_GOAL, CHART_GOAL = 50.0, 1500.0  # milliseconds
MOVES = 20
TEXT = "A long vocabulary makes for a long row of numbers."
MORE = [7, 8, 7]

# Name of a slider in the page: its least and largest value, and the option that it sets.
SLIDERS: dict[str, tuple[float, float, str]] = {
    "t": (0.5, 2.0, "temperature"),
    "k": (10, 200, "top_k"),
    "p": (0.5, 0.99, "top_p"),
    "m": (0.01, 0.3, "min_p"),
    "typ": (0.3, 0.99, "typical_p"),
    "rep": (1.1, 1.9, "repetition_penalty"),
    "freq": (0.1, 1.5, "frequency_penalty"),
    "pres": (0.1, 1.5, "presence_penalty"),
}
# All at once, so weak that most tokens are kept: the most work there is.
ALL: dict[str, float] = {"t": 1.3, "p": 0.99, "typ": 0.98, "rep": 1.2, "freq": 0.4, "pres": 0.3}

# Move a slider as a user does, and time it until the next frame was drawn.
MOVE = """async ([name, value]) => {
  const slider = document.querySelector(`input[name="${name}"]`);
  const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
  const began = performance.now();
  set.call(slider, value);
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  await new Promise((drawn) => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = drawn;  // arrives after the frame
    channel.port2.postMessage(0);
  }));
  return performance.now() - began;
}"""


class Characters:
    """A tokenizer whose ids below 127 are characters; each other id is a token of its own."""

    bos_token_id = eos_token_id = None

    def encode(self, text: str, /, *, bos: bool = False) -> list[int]:  # noqa: ARG002
        """Return one id per character."""
        return [ord(c) for c in text]

    def bytes_after(self, previous: int | None, id: int, /) -> bytes:  # noqa: ARG002
        """Return the text of a token, whatever comes before it."""
        return self.token_bytes(id)

    def token_bytes(self, id: int) -> bytes:
        """Return the text of a token."""
        return chr(id).encode() if 32 <= id < 127 else f" token{id}".encode()

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        return b"".join(map(self.token_bytes, ids)).decode()

    def __len__(self) -> int:
        return VOCAB


PROMPT = Characters().encode(TEXT)


def large_model() -> LanguageModel:
    """Return a model with a vocabulary of the largest size in use, and peaked distributions."""
    torch.manual_seed(0)
    body = LlamaBody(LlamaConfig(VOCAB, 32, 48, 1, 4, 2))
    head = LMHead(32, VOCAB)
    with torch.no_grad():
        head.weight.normal_(0, 0.5)
    return LanguageModel(body.eval(), head, (), Characters(), max_length=512, name="large")


@contextmanager
def served(name: str, model: LanguageModel) -> Iterator[str]:
    """Yield the address of a server with one model."""
    import uvicorn

    from lmhead.server import create_app

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        app = create_app({name: model}, hosts={f"127.0.0.1:{port}"})
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(10)


def ready(page: Page, address: str) -> None:
    """Open an address, and wait for the chart and its texts."""
    page.goto(address)
    page.wait_for_selector('[data-chart="ranked"]')
    page.wait_for_load_state("networkidle")


def slider_times(page: Page, name: str) -> list[float]:
    """Return the milliseconds of each move, after one that is not counted."""
    low, high, _ = SLIDERS[name]
    step = 1 if name == "k" else 0.01
    values = [low + (high - low) * i / MOVES for i in range(MOVES + 1)]
    return [page.evaluate(MOVE, [name, f"{round(v / step) * step:g}"]) for v in values][1:]


def is_right(page: Page, model: LanguageModel) -> bool:
    """Return whether the probabilities in the table are the library's, to 1e-6."""
    rows: list[list[float]] = page.locator('[data-chart="ranked"] tbody tr').evaluate_all(
        "rows => rows.map(row => [Number(row.dataset.id), Number(row.dataset.processed)])"
    )
    options: dict[str, Any] = {
        option: float(page.locator(f'input[name="{name}"]').input_value())
        for name, (_, _, option) in SLIDERS.items()
    }
    options["top_k"] = int(options["top_k"])
    ids = torch.tensor([[*PROMPT, *MORE]])
    with torch.no_grad():
        logits = (model.hidden(ids)[0][:, -1] @ model.head.weight.T).double()
    expected = Sampler(**options).process(logits, ids, prompt_length=len(PROMPT))[0].softmax(-1)
    return all(abs(float(expected[int(id)]) - p) < 1e-6 for id, p in rows) and len(rows) >= 10


def result(name: str, times: list[float], goal: float, right: bool) -> dict[str, Any]:
    """Return a result: milliseconds, the goal for their median, and whether numbers were right."""
    median = summary(times).median
    times_and_goal = {"median": median, "worst": max(times), "goal": goal, "met": median <= goal}
    return {"name": name, **times_and_goal, "wrong": not right, "milliseconds": times}


def measure_sliders(browser: Browser, progress: Progress) -> Iterator[dict[str, Any]]:
    """Measure every slider alone, and with all other stages on."""
    model = large_model()
    with served("large", model) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        for title, others in (("alone", dict[str, float]()), ("with all", ALL)):
            for name, (_, _, option) in SLIDERS.items():
                progress(f"{option}, {title}")
                fixed = {k: v for k, v in others.items() if k != name}
                query = {"prompt": TEXT, "more": ",".join(map(str, MORE)), **fixed}
                ready(page, f"{address}/next?{urlencode(query)}")
                times = slider_times(page, name)
                yield result(f"{option}, {title}", times, SLIDER_GOAL, is_right(page, model))
        page.close()


def measure_first_chart(browser: Browser) -> dict[str, Any]:
    """Measure from the address to the chart, each time in a new context with an empty cache."""
    times = []
    with served("tiny", open_model("tiny")) as address:
        for _ in range(6):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            page = context.new_page()
            start = time.perf_counter()
            page.goto(f"{address}/next", wait_until="commit")
            page.wait_for_selector('[data-chart="ranked"] tbody tr')
            times.append(1000 * (time.perf_counter() - start))
            right = page.locator('[data-chart="ranked"] tbody tr').count() == 10
            context.close()
    return result("first chart, tiny", times, CHART_GOAL, right)


def lines(document: Document, width: int) -> list[str]:
    """Return the table."""
    rows = document["results"]
    columns = [
        (f"milliseconds, Chromium {document['chromium']}", [r["name"] for r in rows]),
        ("median", [f"{r['median']:.1f}" for r in rows]),
        ("worst", [f"{r['worst']:.1f}" for r in rows]),
        ("goal", [f"{r['goal']:g}" for r in rows]),
        ("met", ["WRONG" if r["wrong"] else "yes" if r["met"] else "NO" for r in rows]),
    ]
    return report.table(columns, width)


@benchmark("explorer-speed", f"slider to frame at V = {VOCAB:,}, address to first chart", lines)
def command(run: Run) -> None:
    """Time the web page in a browser: slider to frame, address to first chart.

    Ends with 1 if a number is wrong or a goal is missed.
    """
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if chromium is None:
        raise ValueError("Chromium is missing: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        run.progress("first chart")
        results = [measure_first_chart(browser)]
        run.document |= {"vocab": VOCAB, "chromium": browser.version, "results": results}
        results += measure_sliders(browser, run.progress)
        browser.close()
    run.wrong = any(r["wrong"] or not r["met"] for r in results)
