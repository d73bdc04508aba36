"""The page while it waits, when a request is refused, and when the server does not respond."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, Route, expect

from explorer.read_page import opened, pieces, settled

Watched = tuple[Page, list[str]]

BUSY = {"error": {"code": "busy", "message": "too many requests wait", "seconds": 1}}
pytestmark = pytest.mark.usefixtures("quiet")
PLACES = {
    "next": ("/api/next", '[data-chart="ranked"]'),
    "text": ("/api/score", '[data-chart="heat"]'),
    "lens": ("/api/lens", '[data-chart="grid"]'),
    "compare": ("/api/next", '[data-chart="pairs"]'),
}


@contextmanager
def responding(page: Page, pattern: str, respond: Callable[[Route], None]) -> Iterator[None]:
    """Inside, the test responds to these requests."""
    page.route(re.compile(pattern), respond)
    try:
        yield
    finally:
        page.unroute(re.compile(pattern), respond)


def first(held: list[Route], page: Page) -> Route:
    """The first request that is held, once it has arrived."""
    for _ in range(100):
        if held:
            break
        page.wait_for_timeout(50)
    return held[0]


@contextmanager
def busy_once(page: Page, pattern: str) -> Iterator[None]:
    """Inside, the first of these requests gets 429, and exactly one more is sent."""
    sent = []

    def respond(route: Route) -> None:
        sent.append(route)
        if len(sent) == 1:
            route.fulfill(status=429, content_type="application/json", body=json.dumps(BUSY))
        else:
            route.fallback()

    with responding(page, pattern, respond):
        yield
    assert len(sent) == 2


@pytest.fixture
def quiet(page: Page, watched: Watched) -> Iterator[None]:  # noqa: ARG001 - before the page's end
    """Ignore the browser's own console lines about refused and failed requests."""
    yield
    watched[1][:] = [line for line in watched[1] if "Failed to load resource" not in line]


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("way", ["again", "form"])
def test_a_failed_request_can_be_sent_again(here: Page, address: str, name: str, way: str) -> None:
    path, chart = PLACES[name]
    with responding(here, path, lambda route: route.abort()):
        here.goto(f"{address}/{name}?lang=zh&prompt=hello&text=hello+hello&what=samplers")
        expect(here.locator(".status p")).to_contain_text("服务器没有响应")
        expect(here.locator(chart)).to_have_count(0)
    button = '[data-do="again"]' if way == "again" else 'form.prompt [type="submit"]'
    here.locator(button).click()
    here.wait_for_selector(chart)
    expect(here.locator(".alarm")).to_have_count(0)


def test_a_busy_server_gets_the_request_again_after_its_delay(here: Page, address: str) -> None:
    with busy_once(here, "/api/next"):
        opened(here, f"{address}/next?prompt=hello")


def test_tokens_come_though_the_vocabulary_was_refused_at_first(here: Page, address: str) -> None:
    with busy_once(here, "/api/vocabulary"):
        here.goto(f"{address}/next?prompt=hello")
        token = here.locator('[data-chart="ranked"] button.token-button').first
        expect(token).to_have_text(re.compile(r"^\d+$"))
        expect(token).not_to_have_text(re.compile(r"^\d+$"))


def test_waiting_can_be_stopped(here: Page, address: str) -> None:
    held: list[Route] = []
    with responding(here, "/api/score", lambda route: held.append(route)):
        here.goto(f"{address}/text?text=hello+hello")
        here.locator('[data-do="stop"]').click()
        expect(here.locator(".status p")).to_have_text("Stopped.")
    here.locator('[data-do="again"]').click()
    here.wait_for_selector('[data-chart="heat"]')


def test_a_row_keeps_the_tokens_of_its_model_until_the_next_is_there(
    here: Page, address: str
) -> None:
    """And is neither exported nor shown as the response to the new text."""
    opened(here, f"{address}/next?prompt=hello")
    expect(here.locator(".exports")).to_have_count(1)
    tokens = here.locator('[data-chart="ranked"] button.token-button')
    expect(tokens.first).not_to_have_text(re.compile(r"^\d+$"))
    before = tokens.all_inner_texts()
    held: list[Route] = []
    with responding(here, "/api/next", lambda route: held.append(route)):
        here.locator("select[name=model]").select_option("hostile")
        expect(here.locator(".stale")).to_have_count(1)
        here.wait_for_timeout(300)
        assert tokens.all_inner_texts() == before
        expect(here.locator(".exports")).to_have_count(0)
        first(held, here).continue_()
        settled(here)
        expect(here.locator(".exports")).to_have_count(1)
    assert tokens.all_inner_texts() != before


def test_a_token_is_not_shown_with_the_tokens_of_another_place(here: Page, address: str) -> None:
    here.goto(f"{address}/text?text=hello+hello&at=1")
    here.wait_for_selector('[data-chart="distribution"]')
    held: list[Route] = []
    with responding(here, "/api/next", lambda route: held.append(route)):
        here.locator('[data-chart="heat"] .tok').nth(2).click()
        expect(here.locator('[data-chart="distribution"]')).to_have_count(0)
        first(held, here).abort()
        expect(here.locator('[data-chart="drawer"] .alarm')).to_contain_text("does not respond")
    here.locator('[data-chart="drawer"] [data-do="again"]').click()
    here.wait_for_selector('[data-chart="distribution"]')


def test_a_failed_step_leaves_the_way_back(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello")
    with responding(here, "/api/next", lambda route: route.abort()):
        here.locator('[data-chart="ranked"] button.token-button').first.click()
        expect(here.locator(".status p")).to_contain_text("does not respond")
        expect(here.locator('[data-chart="ranked"]')).to_have_count(1)
    here.go_back()
    settled(here)


@pytest.mark.parametrize(
    ("name", "act", "field"),
    [
        ("next", '[data-chart="ranked"] button.token-button', "#prompt"),
        ("text", '[data-chart="heat"] .tok', "#prompt"),
        ("lens", '[data-chart="grid"] tbody td', "#prompt"),
    ],
)
def test_the_text_stays_under_what_was_done_with_it(
    here: Page, bilingual: str, name: str, act: str, field: str
) -> None:
    """The sample of the other language does not take its place."""
    here.goto(f"{bilingual}/{name}?lang=en")
    here.locator(act).nth(2).click()
    text = here.locator(field).input_value()
    here.locator(".settings").get_by_label("中文").check()
    expect(here.locator("html")).to_have_attribute("lang", "zh-Hans")
    expect(here.locator(field)).to_have_value(text)


@pytest.mark.parametrize(
    ("name", "field"), [("next", "#prompt"), ("lens", "#prompt"), ("text", "#prompt")]
)
def test_what_is_being_written_outlives_a_change_of_language(
    here: Page, bilingual: str, name: str, field: str
) -> None:
    here.goto(f"{bilingual}/{name}?lang=en")
    sample = here.locator(field).input_value()
    here.locator(".settings").get_by_label("中文").check()
    expect(here.locator("html")).to_have_attribute("lang", "zh-Hans")
    expect(here.locator(field)).not_to_have_value(sample)
    here.locator(field).fill("hello hello")
    here.locator(".settings").get_by_label("English").check()
    expect(here.locator("html")).to_have_attribute("lang", "en")
    expect(here.locator(field)).to_have_value("hello hello")


def test_a_long_prompt_comes_back_after_a_reload(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello")
    text = "hello " * 20_000
    here.locator("#prompt").fill(text)
    here.locator('form.prompt [type="submit"]').click()
    expect(here.locator(".alarm")).to_contain_text("from 1 to 64 tokens")
    here.reload()
    expect(here.locator("#prompt")).to_have_value(text)
    expect(here.locator(".alarm")).to_contain_text("from 1 to 64 tokens")


def test_a_fraction_of_a_token_is_not_requested(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&top=3.7")
    expect(here.locator('[data-chart="ranked"] tbody tr')).to_have_count(10)


def test_without_the_list_of_models_the_page_says_so(here: Page, address: str) -> None:
    with responding(here, "/api/models", lambda route: route.abort()):
        here.goto(f"{address}/next?prompt=hello")
        expect(here.locator(".status p")).to_contain_text("does not respond")
        expect(here.get_by_role("heading")).to_have_count(0)
    here.locator('[data-do="again"]').click()
    settled(here)
    expect(pieces(here)).not_to_have_count(0)


def test_pages_have_names_and_the_model_goes_along(here: Page, address: str) -> None:
    opened(here, f"{address}/next?model=hostile")
    expect(here).to_have_title("Next token · lmhead")
    here.get_by_role("navigation", name="Pages").get_by_role("link", name="Text").click()
    here.wait_for_selector('[data-chart="heat"]')
    expect(here).to_have_title("Text · lmhead")
    expect(here.locator("select[name=model]")).to_have_value("hostile")


def test_the_page_follows_the_colours_of_the_machine(page: Page, site: str) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(site)
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.emulate_media(color_scheme="light")
