"""What pages show, as a test reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
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


def api_requests(page: Page) -> list[str]:
    """Return a list that fills with the page's API requests from now on.

    Requests for the weights of a token, which run no model, are left out.
    """
    found: list[str] = []

    def record(request: Request) -> None:
        weights = request.url.endswith("/api/products") and "ids" not in (
            request.post_data_json or {}
        )
        if "/api/" in request.url and not weights:
            found.append(request.url)

    page.on("request", record)
    return found


def outside(page: Page) -> list[str]:
    """What reaches beyond the right edge; code scrolls in its box."""
    found: list[str] = page.evaluate(
        "() => [...document.querySelectorAll('main *:not(pre code)')].filter(e =>"
        " e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    return found


@contextmanager
def refusal(watched: tuple[Page, list[str]]) -> Iterator[None]:
    """Expect that the server refuses one request inside.

    The browser writes a line about it to the console, at its own time: wait for it, and remove it
    from the messages that fail a test.
    """
    page, messages = watched
    with page.expect_console_message(lambda message: "400" in message.text):
        yield
    (message,) = messages
    assert "400" in message
    messages.clear()
