"""The guard of conftest.py: a request to another host is noticed, and fails."""

from playwright.sync_api import Page


def test_another_host_is_noticed_and_does_not_answer(
    page: Page, watched: tuple[Page, list[str]]
) -> None:
    page.goto("about:blank")  # the site's own policy refuses such requests
    answer = page.evaluate("() => fetch('http://example.com/').catch(() => 'no answer')")
    found = list(watched[1])
    watched[1].clear()
    assert answer == "no answer"
    assert found[0] == "request to example.com"
    page.goto("/learn")
    page.wait_for_selector("h1")
    assert watched[1] == []
