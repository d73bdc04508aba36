"""A report works from a file, without a server: sliders, colours and numbers under the pointer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

import lmhead
from explorer.read_page import opened
from explorer.sites import saved
from explorer.test_bench import left
from lmhead.analysis import score
from lmhead.models import LanguageModel

TEXT = "hello ab cab hello lo"


@pytest.fixture
def reader(browser: Browser) -> Iterator[Page]:
    """A browser without a network."""
    context = browser.new_context(offline=True)
    messages: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    yield page
    context.close()
    assert messages == []


def read(reader: Page, here: Page, folder: Path) -> None:
    """Open the report of a page as a file."""
    here.wait_for_selector(".exports")
    path = folder / "report.html"
    path.write_bytes(saved(here, "html").read_bytes())
    reader.goto(path.as_uri())


def test_sliders_give_the_library_s_numbers(
    here: Page, address: str, reader: Page, tmp_path: Path, models: dict[str, LanguageModel]
) -> None:
    opened(here, f"{address}/next?prompt=hello&t=0.5")
    read(reader, here, tmp_path)
    bars = reader.locator(".live-bars tbody tr")
    expect(bars).to_have_count(20)

    def expect_same(**options: float) -> None:
        want = left(models["tiny"], lmhead.Sampler(seed=0, **options), "hello")  # type: ignore[arg-type]
        found = bars.evaluate_all("rows => rows.map(row => Number(row.dataset.p))")
        best = want.sort(descending=True).values[:20].tolist()
        assert sorted(found, reverse=True) == pytest.approx(best, abs=1e-6)

    expect_same(temperature=0.5)
    slider = reader.locator("input[type=range]")
    for name, value in (("temperature", 1.5), ("top_k", 12), ("top_p", 0.8), ("min_p", 0.2)):
        reader.locator(f"input[name={name}]").fill(str(value))
    assert slider.count() == 4
    expect_same(temperature=1.5, top_k=12, top_p=0.8, min_p=0.2)


def test_a_text_can_be_coloured_and_pointed_at(
    here: Page, address: str, reader: Page, tmp_path: Path, models: dict[str, LanguageModel]
) -> None:
    here.goto(f"{address}/text?text={TEXT}")
    read(reader, here, tmp_path)
    cells = reader.locator(".live-cell")
    tokens: list[float] = []
    score(models["tiny"], TEXT, on_token=lambda token: tokens.append(token.bits))
    expect(cells).to_have_count(len(tokens) + 1)
    # A report has no alternatives to click for.
    expect(reader.locator(".live-status")).to_have_text("Point at a token for its numbers.")
    cells.nth(2).hover()
    expect(reader.locator(".live-status")).to_contain_text(f"surprisal {tokens[1]:.2f}")
    shares = "cells => cells.map(cell => cell.style.getPropertyValue('--share'))"
    before = cells.evaluate_all(shares)
    reader.locator("select").select_option("p")
    assert cells.evaluate_all(shares) != before


def test_the_lens_keeps_its_measures(
    here: Page, address: str, reader: Page, tmp_path: Path
) -> None:
    here.goto(f"{address}/lens?prompt=hello")
    read(reader, here, tmp_path)
    expect(reader.locator(".live-status")).to_have_text("Point at a cell for its numbers.")
    reader.locator("select").select_option("entropy")
    cell = reader.locator(".live-grid .live-cell").last
    number = cell.locator("small").inner_text()
    cell.hover()
    expect(reader.locator(".live-status")).to_contain_text(f"entropy {number}")
