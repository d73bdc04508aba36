"""Take the pictures of the explorer that the docs show: docs/images/*.png.

    make explorer
    python scripts/screenshots.py                    all of them
    python scripts/screenshots.py train              one page's
    python scripts/screenshots.py --review FOLDER    whole pages, also in dark colours, for a review

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
    Shot("glossary", "/glossary?", ".terms, dl"),
]
IN_DOCS = [shot for shot in SHOTS if shot.name != "glossary"]


def main(wanted: list[str]) -> None:
    """Take the pictures of these pages, or of all; for a review if --review comes first."""
    review = Path(wanted[1]) if wanted[:1] == ["--review"] and len(wanted) == 2 else None
    if review is not None:
        review.mkdir(parents=True, exist_ok=True)
        wanted = []
    shots = [shot for shot in (SHOTS if review else IN_DOCS) if not wanted or shot.name in wanted]
    if not shots:
        names = ", ".join(shot.name for shot in IN_DOCS)
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
                save(page.screenshot(full_page=review is not None), path)
                context.close()
                yield path


def save(png: bytes, path: Path) -> None:
    """Write the picture with a palette of 128 colours: the page has no photographs."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    few = picture.quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def train_a_little(run: Path) -> None:
    """Train a small model on the characters of the docs."""
    text = run.with_suffix(".txt")
    pages = sorted((ROOT / "docs").glob("*.md"))
    text.write_text("\n".join(page.read_text(encoding="utf-8") for page in pages), "utf-8")
    given = {"corpus": [str(text)], "steps": 240, "layers": 2, "width": 64, "batch": 8}
    given |= {"log_every": 4, "eval_every": 40, "eval_tokens": 1000, "sample_tokens": 100}
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
