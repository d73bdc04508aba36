"""What the pages state: the header of every page, and statements that were wrong once."""

import re

import pytest
from playwright.sync_api import Page, Route, expect

PAGES = ("next", "learn", "text", "lens", "compare", "train", "glossary")


@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_shows_the_model_with_its_size_and_vocabulary(
    here: Page, bilingual: str, width: int
) -> None:
    here.set_viewport_size({"width": width, "height": 844})
    for name in PAGES:
        here.goto(f"{bilingual}/{name}?lang=en")
        shown = here.locator('[data-chart="model"], .model-line').filter(visible=True)
        expect(shown).to_have_count(1)
        expect(shown).to_contain_text(re.compile(r"^tiny.*2\.0 M parameters, 5,120 tokens$"))


def test_the_header_says_when_the_server_is_gone_and_when_it_is_back(
    here: Page, bilingual: str, watched: tuple[Page, list[str]]
) -> None:
    here.goto(f"{bilingual}/learn?lang=en")
    here.wait_for_selector("#chain")

    def refuse(route: Route) -> None:
        route.abort()

    look = "() => document.dispatchEvent(new Event('visibilitychange'))"
    gone = here.locator("header").get_by_text("The server does not respond")
    expect(gone).to_have_count(0)
    here.route("**/api/models", refuse)
    here.evaluate(look)
    expect(gone).to_be_visible()
    here.unroute("**/api/models", refuse)
    here.evaluate(look)
    expect(gone).to_have_count(0)
    watched[1].clear()  # the browser's own lines about the refused requests


def test_tying_saves_one_matrix_and_the_text_says_no_other_share(page: Page) -> None:
    """135M with an untied head: 28,311,552 of 162,826,560 parameters, 17 %, not half."""
    page.goto("/learn?lang=en&sizes=smollm2")
    panel = page.locator("#linear .panel")
    expect(panel).to_contain_text("Tying saves 28,311,552 parameters, 17% of the untied model")
    assert round(100 * 28_311_552 / 162_826_560) == 17
    expect(page.locator("#linear")).not_to_contain_text("half")


def test_one_over_p_is_not_called_a_number_of_choices(page: Page) -> None:
    page.goto("/learn?lang=en&target=5")
    expect(page.locator("#loss")).to_contain_text("1/p = ")
    expect(page.locator("#loss")).not_to_contain_text(re.compile("choice among|equal", re.I))


def test_rmsnorm_is_named_where_norms_are_explained(page: Page) -> None:
    page.goto("/learn?lang=en")
    text = page.locator("#hidden .text-column").inner_text()
    assert "RMSNorm in most recent models" in text
    assert "Most models put a layer norm" not in text
