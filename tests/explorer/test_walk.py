"""A first visit: ten tasks, each in at most three actions from the page that opens."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from explorer.read_page import opened, pieces

MOST = 3  # actions


class Visitor:
    """Acts on a page and counts: a click, a text typed, a key, a slider moved."""

    def __init__(self, page: Page) -> None:
        self.page, self.actions = page, 0

    def click(self, selector: str) -> None:
        self.actions += 1
        self.page.locator(selector).first.click()

    def link(self, name: str) -> None:
        self.actions += 1
        menu = self.page.get_by_role("navigation", name="Pages")
        menu.get_by_role("link", name=name, exact=True).click()

    def type(self, selector: str, text: str) -> None:
        self.actions += 1
        self.page.locator(selector).fill(text)

    def press(self, selector: str, key: str) -> None:
        self.actions += 1
        self.page.locator(selector).press(key)


def predict(visitor: Visitor) -> None:
    visitor.type("#prompt", "hello ab")
    visitor.press("#prompt", "Control+Enter")
    visitor.page.wait_for_function("() => location.search.includes('prompt=hello+ab')")
    expect(visitor.page.locator('[data-chart="ranked"] tbody tr')).not_to_have_count(0)


def tune(visitor: Visitor) -> None:
    visitor.type('input[name="t-exact"]', "0.5")
    expect(visitor.page.locator('[data-chart="stages"] tbody tr')).to_have_count(2)


def continue_(visitor: Visitor) -> None:
    count = pieces(visitor.page).count()
    visitor.click('[data-do="step"]')
    expect(pieces(visitor.page)).to_have_count(count + 1)


def undo(visitor: Visitor) -> None:
    continue_(visitor)
    count = pieces(visitor.page).count()
    visitor.click('[data-do="undo"]')
    expect(pieces(visitor.page)).to_have_count(count - 1)


def find(visitor: Visitor) -> None:
    visitor.type('input[type="search"]', "a")
    expect(visitor.page.locator('[data-chart="found"] tbody tr').first).to_be_visible()


def read(visitor: Visitor) -> None:
    visitor.link("Text")
    expect(visitor.page.locator('[data-chart="heat"] .tok').first).to_be_visible()


def open_(visitor: Visitor) -> None:
    read(visitor)
    visitor.click('[data-chart="heat"] .tok:not(.unscored)')
    expect(visitor.page.locator('[data-chart="distribution"]')).to_be_visible()


def lens(visitor: Visitor) -> None:
    visitor.link("Layers")
    expect(visitor.page.locator('[data-chart="grid"] tbody tr').first).to_be_visible()


def compare(visitor: Visitor) -> None:
    visitor.link("Compare")
    expect(visitor.page.locator('[data-chart="pairs"]').first).to_be_visible()


def export(visitor: Visitor) -> None:
    visitor.page.wait_for_selector(".exports")
    with visitor.page.expect_download() as saved:
        visitor.click('[data-export="png"]')
    assert saved.value.suggested_filename == "lmhead-next.png"


TASKS: list[Callable[[Visitor], None]] = [
    predict, tune, continue_, undo, find, read, open_, lens, compare, export
]  # fmt: skip


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__.strip("_"))
def test_a_task_takes_at_most_three_actions(
    here: Page, bilingual: str, task: Callable[[Visitor], None]
) -> None:
    opened(here, f"{bilingual}/")
    visitor = Visitor(here)
    task(visitor)
    assert 1 <= visitor.actions <= MOST
