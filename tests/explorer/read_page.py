"""What the page of the next token shows, as a test reads it."""

from typing import Any

from playwright.sync_api import Page, Request, expect


def opened(page: Page, address: str) -> None:
    """Go there, and wait until the model has read the text."""
    page.goto(address)
    settled(page)


def settled(page: Page) -> None:
    """Wait until the model has read the prompt, and tokens have their texts instead of ids."""
    page.wait_for_selector('[data-chart="ranked"]')
    expect(page.locator(".prediction")).to_have_attribute("aria-busy", "false")
    # The status of the prompt comes first; that of continuations, if requested, after it.
    expect(page.locator("[aria-busy]").first).to_have_attribute("aria-busy", "false")


def column(page: Page, chart: str, field: str) -> list[str]:
    """A field of every row of a table."""
    found: list[str] = page.locator(f'[data-chart="{chart}"] tbody tr').evaluate_all(
        f"rows => rows.map(row => row.dataset.{field})"
    )
    return found


def numbers(page: Page, field: str, chart: str = "ranked") -> list[float]:
    return [float(text) for text in column(page, chart, field)]


def pieces(page: Page) -> Any:
    """The tokens of the text."""
    return page.locator('[data-chart="pieces"] .piece')


def asked(page: Page) -> list[str]:
    """A list that fills with what the page asks the models from now on."""
    found: list[str] = []

    def hear(request: Request) -> None:
        if "/api/" in request.url:
            found.append(request.url)

    page.on("request", hear)
    return found


def outside(page: Page) -> list[str]:
    """What reaches beyond the right edge."""
    found: list[str] = page.evaluate(
        "() => [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right"
        " > document.documentElement.clientWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    return found
