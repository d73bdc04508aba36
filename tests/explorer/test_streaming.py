"""Results come in parts, with progress; a stop keeps what is there."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from server.serve_tiny import running
from torch import Tensor

from explorer.test_state import menu
from lmhead import LMHead
from lmhead.explorer import page_folder
from lmhead.models import LanguageModel
from lmhead.scores import Scores

TEXT = "hello ab cab hello lo " * 12


class Gate:
    """Lets a model make the given number of calls of its head, and then holds it."""

    def __init__(self) -> None:
        self.left = threading.Semaphore(0)
        self.open_for_all = False
        self.counts_scores = False  # calls of `scores` too, not only of the module

    def allow(self, calls: int) -> None:
        for _ in range(calls):
            self.left.release()

    def open(self) -> None:
        self.open_for_all = True
        self.allow(1)

    def wait(self) -> None:
        if not self.open_for_all:
            self.left.acquire(timeout=60)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def gated(page: Page, models: dict[str, LanguageModel], gate: Gate) -> Iterator[str]:
    """The address of a server whose first model waits at the gate before each use of its head.

    The second has the same weights and does not wait.
    """
    whole = models["tiny"]

    class Held(LMHead):
        def forward(self, hidden: Tensor) -> Any:
            gate.wait()
            return super().forward(hidden)

        def scores(self, hidden: Tensor) -> Scores:
            if gate.counts_scores:
                gate.wait()
            return super().scores(hidden)

    head = Held(whole.head.hidden_size, whole.head.vocab_size)
    head.weight = whole.head.weight
    model = LanguageModel(whole.body, head, whole.eos_token_ids, whole.tokenizer, 16)
    with running(page_folder(), models={"tiny": model, "twin": whole}) as port:
        site = f"http://127.0.0.1:{port}"
        yield site
        gate.open()
        page.goto("about:blank")


def progress(page: Page) -> Any:
    return page.locator('[data-chart="progress"]')


def test_a_text_appears_window_by_window_and_a_stop_keeps_it(
    page: Page, gated: str, gate: Gate
) -> None:
    gate.allow(2)
    page.goto(f"{gated}/text?text={TEXT}")
    tokens = page.locator('[data-chart="heat"] .tok')
    expect(tokens).to_have_count(25)  # the first, 16 of the first window, 8 of the second
    expect(progress(page)).to_have_attribute("data-done", "24")
    expect(progress(page)).to_contain_text("s left")
    gate.allow(1)
    expect(tokens).to_have_count(33)
    page.locator('[data-do="stop"]').click()
    expect(page.locator(".status p")).to_contain_text("Stopped. 32 of")
    expect(tokens).to_have_count(33)
    expect(page.locator('[data-chart="sums"]')).to_contain_text("32 tokens")
    menu(page, "Glossary")
    menu(page, "Text")
    expect(tokens).to_have_count(33)
    gate.open()
    page.locator('[data-do="again"]').click()
    expect(page.locator(".exports")).to_have_count(1)
    assert tokens.count() > 100


def test_the_lens_appears_row_by_row(page: Page, gated: str, gate: Gate) -> None:
    rows = page.locator('[data-chart="grid"] tbody tr')
    gate.counts_scores = True
    gate.allow(3)  # the model's own prediction, the output to compare with, and the first layer
    page.goto(f"{gated}/lens?prompt=hello")
    expect(rows).to_have_count(1)
    expect(rows.first.locator("th")).to_have_text("embedding")
    expect(progress(page)).to_have_attribute("data-all", "3")
    page.locator('[data-do="stop"]').click()
    expect(page.locator(".status p")).to_contain_text("Stopped. 1 of 3")
    expect(rows).to_have_count(1)
    gate.open()
    page.locator('[data-do="again"]').click()
    expect(rows).to_have_count(3)
    expect(rows.last.locator("th")).to_have_text("output")


@pytest.mark.parametrize(
    ("sides", "windows", "first", "then"),
    [("what=samplers&ta=0.5", 1, 1, 65), ("what=models&a=tiny&b=twin", 1, 16, 80)],
)
def test_a_comparison_appears_in_parts_and_a_stop_keeps_it(
    page: Page, gated: str, gate: Gate, sides: str, windows: int, first: int, then: int
) -> None:
    """A part is the first window, or its first position; then 64 positions or more."""
    gate.allow(windows)
    page.goto(f"{gated}/compare?where=text&text={TEXT}&{sides}")
    places = page.locator('[data-chart="map"] .place:not(.first)')
    agreement = page.locator('[data-chart="totals"] [data-name="agreement"]')
    expect(places).to_have_count(first)
    expect(progress(page)).to_have_attribute("data-done", str(first))
    gate.allow(4)
    expect(places).to_have_count(then)
    expect(progress(page)).to_have_attribute("data-done", str(then))
    expect(agreement).to_contain_text(f"of {then} positions")
    assert page.locator(".exports").count() == 0
    page.locator('[data-do="stop"]').click()
    expect(page.locator(".status p")).to_contain_text(f"Stopped. {then} of")
    expect(places).to_have_count(then)
    menu(page, "Glossary")
    menu(page, "Compare")
    expect(places).to_have_count(then)
    gate.open()
    page.locator('[data-do="again"]').click()
    expect(page.locator(".exports")).to_have_count(1)
    expect(progress(page)).to_have_count(0)
    assert places.count() > 100


def test_three_ways_grow_side_by_side(page: Page, gated: str, gate: Gate) -> None:
    gate.open()
    page.goto(f"{gated}/next?prompt=he&n=6")
    page.wait_for_selector('[data-chart="flow"]')
    page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")
    page.wait_for_load_state("networkidle")
    while gate.left.acquire(blocking=False):
        pass
    gate.open_for_all = False
    gate.allow(6)  # two rounds of three
    page.locator('[data-do="paths"]').click()
    for name in ("greedy", "sampler", "beam"):
        ids = page.locator(f'[data-path="{name}"]')
        expect(ids).to_be_visible()
        expect(ids).to_have_attribute("data-ids", re.compile(r"^\d+,\d+$"))
    page.locator('.paths [data-do="stop"]').click()
    expect(page.locator(".paths .status p")).to_contain_text("Stopped. 6 of 18")
    expect(page.locator("[data-path]")).to_have_count(3)
    expect(page.locator('[data-path="greedy"] .note').first).to_have_text("2 of 6 tokens so far.")
    page.get_by_role("button", name="Continue with all 2").first.click()
    page.wait_for_function("() => location.search.includes('more=')")
    gate.open()
    expect(page.locator("button.piece.new, .piece.new")).to_have_count(2)


def test_nothing_jumps_while_a_text_is_read(page: Page, gated: str, gate: Gate) -> None:
    gate.open()
    page.goto(f"{gated}/text?text=hello+ab")
    page.wait_for_selector('[data-chart="heat"]')
    expect(page.locator(".exports")).to_have_count(1)
    before = page.locator('[data-chart="heat"]').bounding_box()
    while gate.left.acquire(blocking=False):
        pass
    gate.open_for_all = False
    page.locator("#prompt").fill("hello ab cab")
    page.locator("#prompt").press("Control+Enter")
    expect(page.locator(".stale")).to_have_count(1)
    assert page.locator('[data-chart="heat"]').bounding_box() == before
