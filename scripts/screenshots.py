"""Take the pictures of the explorer that the docs show: docs/images/*.png.

    make explorer
    python scripts/screenshots.py                    all of them
    python scripts/screenshots.py train              one page's
    python scripts/screenshots.py --review FOLDER    whole pages for a review: also in dark
                                                     colours, more states of pages, reports

Every page, in English and Chinese, 1280 and 390 pixels wide, on the bundled model `tiny`; two in
dark colours. The run on the page of training is a real one, a short one, on the text of the docs.
Needs Chromium and Pillow.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import uvicorn
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from lmhead.models import open_model
from lmhead.server import create_app
from lmhead.train import make_config, train

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = {1280: 900, 390: 844}
MOST_BYTES = 4 << 20  # of all pictures together


class Shot(NamedTuple):
    """A page, and what of it is shown."""

    name: str
    path: str
    ready: str  # what must be there before the picture is taken
    top: str = "header.frame"  # what the picture begins with
    dark: bool = False
    report: bool = False  # the exported report instead of the page


SHOTS = [
    Shot("learn", "/learn?", "#chain", "#chain"),
    Shot("next", "/next?", '[data-chart="ranked"]', dark=True),
    Shot("text", "/text?", '[data-chart="heat"]'),
    Shot("lens", "/lens?", '[data-chart="grid"]'),
    Shot("compare", "/compare?", '[data-chart="pairs"]'),
    Shot(
        "train", "/train?v=128256&d=4096&n=16384", '[data-chart="loss"]', "section.step:not(.watch)"
    ),
    Shot("run", "/train?", '[data-chart="sample"]', dark=True),
]
MORE = "prompt=The+old+man+sat+down+and+the+dog&t=0.8&k=40&p=0.9"
TEXT = "text=The+old+man+sat+down.+The+dog+looked+at+him,+and+the+old+man+laughed:+good+dog!"
FOR_REVIEW = [
    Shot("glossary", "/glossary?", ".terms, dl"),
    Shot("next-more", f"/next?how=1&paths=1&scale=log&{MORE}", '[data-path="beam"]'),
    Shot("text-open", f"/text?numbers=1&at=5&{TEXT}", '[data-chart="distribution"]'),
    Shot(
        "compare-text", f"/compare?what=samplers&where=text&ta=0.5&{TEXT}", '[data-chart="totals"]'
    ),
    Shot("unknown-page", "/nowhere?", '[data-chart="missing"]'),
    Shot("unknown-model", "/next?model=gone", '[data-chart="missing-model"]'),
    *(
        Shot(f"report-{name}", f"/{name}?", ".exports", report=True)
        for name in ("next", "text", "lens", "compare", "learn", "train")
    ),
]


def main(wanted: list[str]) -> None:
    """Take the pictures of these pages, or of all; for a review if --review comes first."""
    review = None
    if wanted[:1] == ["--review"] and len(wanted) > 1:
        review, wanted = Path(wanted[1]), wanted[2:]
        review.mkdir(parents=True, exist_ok=True)
    every = [*SHOTS, *FOR_REVIEW] if review else SHOTS
    shots = [shot for shot in every if not wanted or shot.name in wanted]
    if not shots:
        names = ", ".join(shot.name for shot in every)
        raise SystemExit(f"pages must be among {names}; got {' '.join(wanted)}")
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        raise SystemExit("no Chromium here: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = Path(folder) / "run"
        train_a_little(run)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        with serving(run) as address:
            for shot in shots:
                for path in take_all(browser, address, shot, review):
                    print(f"{path.stat().st_size:>8,} {path.name}")
        browser.close()
    if review:
        return
    total = sum(path.stat().st_size for path in IMAGES.glob("*.png"))
    print(f"{total:>8,} in all")
    if total > MOST_BYTES:
        raise SystemExit(f"the pictures must have at most {MOST_BYTES:,} bytes together")


def take_all(
    browser: Browser, address: str, shot: Shot, review: Path | None = None
) -> Iterator[Path]:
    """Take pictures of a page in both languages and widths, and in dark colours if wanted.

    For a review, all are taken in both colours, and show the whole page.
    """
    for lang in ("en", "zh"):
        for width, height in WIDTHS.items():
            dark = review or (shot.dark and width > 1000)
            for theme in ("light", "dark") if dark else ("light",):
                context = browser.new_context(
                    viewport={"width": width, "height": height}, reduced_motion="reduce"
                )
                page = context.new_page()
                page.goto(f"{address}{shot.path}&lang={lang}&theme={theme}")
                page.wait_for_selector(shot.ready)
                page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")
                if shot.report:
                    with page.expect_download() as saved:
                        page.locator('[data-export="html"]').click()
                    report = Path(saved.value.path()).rename(
                        saved.value.path().with_suffix(".html")
                    )
                    page.goto(report.as_uri())
                else:
                    # What stays on top while scrolling would cover what is to be seen.
                    page.evaluate(
                        "top => { document.querySelector('.frame').style.position = 'static';"
                        " document.querySelector(top).scrollIntoView({behavior: 'instant'}) }",
                        shot.top,
                    )
                page.wait_for_timeout(300)
                parts = [shot.name, lang, *(["390"] if width == 390 else [])]
                parts += ["dark"] if theme == "dark" else []
                path = (review or IMAGES) / f"{'-'.join(parts)}.png"
                if review:
                    page.screenshot(path=path, full_page=True)
                else:
                    save(page.screenshot(), path)
                context.close()
                yield path


def save(png: bytes, path: Path) -> None:
    """Write the picture with a palette of 128 colours: the page has no photographs."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    few = picture.quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def train_a_little(run: Path) -> None:
    """Train a small model on the characters of the docs, in English."""
    torch.set_num_threads(1)  # so that a busy machine slows it down less
    text = run.with_suffix(".txt")
    pages = [page for page in sorted((ROOT / "docs").glob("*.md")) if ".zh" not in page.name]
    text.write_text("\n".join(page.read_text(encoding="utf-8") for page in pages), "utf-8")
    given = {"corpus": [str(text)], "steps": 600, "layers": 2, "width": 64, "batch": 8}
    given |= {"log_every": 10, "eval_every": 60, "eval_tokens": 1000, "sample_tokens": 100}
    given |= {"warmup": 20, "learning_rate": 3e-3, "curve": False}
    train(make_config(given, preset="shakespeare-char"), run)


@contextlib.contextmanager
def serving(run: Path) -> Iterator[str]:
    """Run a server with `tiny` and the run; yield its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    host = f"127.0.0.1:{listener.getsockname()[1]}"
    app = create_app({"tiny": open_model("tiny")}, hosts={host}, run=run)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
        yield f"http://{host}"
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()


if __name__ == "__main__":
    main(sys.argv[1:])
