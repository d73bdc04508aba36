"""The guard of conftest.py: a page that asks another host is noticed, and gets no answer."""

from playwright.sync_api import Page


def test_another_host_is_noticed_and_does_not_answer(
    page: Page, watched: tuple[Page, list[str]]
) -> None:
    page.goto("about:blank")  # the site's own policy refuses such requests
    answer = page.evaluate("() => fetch('http://example.com/').catch(() => 'no answer')")
    heard = list(watched[1])
    watched[1].clear()
    assert answer == "no answer"
    assert heard[0] == "asked example.com"
    page.goto("/learn")
    page.wait_for_selector("h1")
    assert watched[1] == []
