"""The page of the next word, in a browser: from a slider to its picture, and to the first picture.

    python benchmarks/explorer_speed.py                    (quiet machine, please)

Slider: a model with 262,144 words. Every slider of the sampler is moved twenty times, alone and
with all other stages on; a time is taken from the event to the frame behind it. The numbers that
the page then shows are compared with the library's. First picture: from opening the address to
ranked words on the screen, in a new context of the browser, with `tiny`. Goals: 50 ms and 1.5 s.

Needs Chromium, Playwright and the built page (`make explorer`). Ends with 1 if a number is wrong or
a goal is missed.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

import torch
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from lmhead import LMHead, Sampler, open_model
from lmhead.models import LanguageModel
from lmhead.nn import LlamaBody, LlamaConfig
from lmhead.server import create_app

VOCAB = 262_144
SLIDER_GOAL, PICTURE_GOAL = 50.0, 1500.0  # milliseconds
MOVES = 20
TEXT = "A long vocabulary makes for a long row of numbers."
MORE = [7, 8, 7]

# The slider by its name in the page: its least and largest value, and the option that it sets.
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
# All at once, so weak that most words stay until the end: the most work there is.
ALL: dict[str, float] = {"t": 1.3, "p": 0.99, "typ": 0.98, "rep": 1.2, "freq": 0.4, "pres": 0.3}

# Set a slider as a hand does, and take the time until the frame behind it was drawn.
MOVE = """async ([name, value]) => {
  const slider = document.querySelector(`input[name="${name}"]`);
  const set = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set;
  const began = performance.now();
  set.call(slider, value);
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  await new Promise((drawn) => requestAnimationFrame(() => {
    const channel = new MessageChannel();
    channel.port1.onmessage = drawn;  // comes behind the frame
    channel.port2.postMessage(0);
  }));
  return performance.now() - began;
}"""


class Characters:
    """A tokenizer: a character is its code, and an id above them a word of its own."""

    bos_token_id = eos_token_id = None

    def encode(self, text: str) -> list[int]:
        """One id per character."""
        return [ord(c) for c in text]

    def token_bytes(self, id: int) -> bytes:
        """Its text."""
        return chr(id).encode() if 32 <= id < 127 else f" word{id}".encode()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        return b"".join(map(self.token_bytes, ids)).decode()

    def __len__(self) -> int:
        return VOCAB


PROMPT = Characters().encode(TEXT)


def large_model() -> LanguageModel:
    """As many words as the largest vocabularies have, and a distribution with a peak."""
    torch.manual_seed(0)
    body = LlamaBody(LlamaConfig(VOCAB, 32, 48, 1, 4, 2))
    head = LMHead(32, VOCAB)
    with torch.no_grad():
        head.weight.normal_(0, 0.5)
    return LanguageModel(body.eval(), head, (), Characters(), max_length=512, name="large")


@contextmanager
def served(name: str, model: LanguageModel) -> Iterator[str]:
    """The address of a server with one model."""
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
    """Open it, and wait for the words and their texts."""
    page.goto(address)
    page.wait_for_selector('[data-chart="ranked"]')
    page.wait_for_load_state("networkidle")


def slider_times(page: Page, name: str) -> list[float]:
    """Milliseconds of each move, after one that does not count."""
    low, high, _ = SLIDERS[name]
    step = 1 if name == "k" else 0.01
    values = [low + (high - low) * i / MOVES for i in range(MOVES + 1)]
    return [page.evaluate(MOVE, [name, f"{round(v / step) * step:g}"]) for v in values][1:]


def is_right(page: Page, model: LanguageModel) -> bool:
    """Whether the sampler's probabilities in the table are the library's, to 1e-6."""
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
    left = Sampler(**options).process(logits, ids, prompt_length=len(PROMPT))[0].softmax(-1)
    return all(abs(float(left[int(id)]) - p) < 1e-6 for id, p in rows) and len(rows) > 10


def measure_sliders(browser: Browser) -> bool:
    """Every slider alone, and with all other stages on."""
    model = large_model()
    fine = True
    print(
        f"slider to picture, V = {VOCAB:,}, goal {SLIDER_GOAL:g} ms (median and worst of {MOVES})"
    )
    with served("large", model) as address:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        for title, others in (("alone", dict[str, float]()), ("with all", ALL)):
            for name, (_, _, option) in SLIDERS.items():
                fixed = {k: v for k, v in others.items() if k != name}
                query = {"prompt": TEXT, "more": ",".join(map(str, MORE)), **fixed}
                ready(page, f"{address}/next?{urlencode(query)}")
                times = slider_times(page, name)
                right = is_right(page, model)
                fast = max(times) <= SLIDER_GOAL
                verdict = ("" if right else "  WRONG") + ("" if fast else "  TOO SLOW")
                print(
                    f"  {option:20} {title:9} {statistics.median(times):6.1f} {max(times):6.1f}"
                    f"{verdict}"
                )
                fine = fine and right and fast
        page.close()
    return fine


def measure_first_picture(browser: Browser) -> bool:
    """From the address to ranked words, each time in a new context, which has nothing cached."""
    times = []
    with served("tiny", open_model("tiny")) as address:
        for _ in range(6):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            page = context.new_page()
            began = time.perf_counter()
            page.goto(f"{address}/next", wait_until="commit")
            page.wait_for_selector('[data-chart="ranked"] tbody tr')
            times.append(1000 * (time.perf_counter() - began))
            right = page.locator('[data-chart="ranked"] tbody tr').count() == 15
            context.close()
    fast = max(times) <= PICTURE_GOAL
    verdict = ("" if right else "  WRONG") + ("" if fast else "  TOO SLOW")
    print(f"first picture, tiny, goal {PICTURE_GOAL:g} ms (the first one; median and worst of all)")
    print(f"  {times[0]:.0f} {statistics.median(times):.0f} {max(times):.0f}{verdict}")
    return right and fast


def main() -> int:
    """Both, in one browser."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if found is None:
        print("no Chromium here: apt-get install chromium", file=sys.stderr)
        return 1
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        print(f"Chromium {browser.version}")
        fine = [measure_first_picture(browser), measure_sliders(browser)]
        browser.close()
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
