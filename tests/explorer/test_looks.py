"""Layout: narrow screens, forced colours, small text."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page

TEXT = "hello ab cab hello lo"
PAGES = ["/learn", "/next?prompt=a&top=40", f"/text?text={TEXT}", "/lens?prompt=hello", "/train"]


def show(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".exports")


@pytest.fixture
def forced(here: Page) -> Iterator[Page]:
    """The page where the system sets the colours."""
    here.emulate_media(forced_colors="active")
    yield here
    here.emulate_media(forced_colors="none")


def look(page: Page, selector: str, pseudo: str = "") -> str:
    """The ground of an element, colour and picture."""
    found: str = page.locator(selector).first.evaluate(
        "(e, pseudo) => { const s = getComputedStyle(e, pseudo || null);"
        " return `${s.backgroundColor} ${s.backgroundImage}` }",
        pseudo,
    )
    return found


def test_what_is_chosen_is_seen_in_forced_colours(forced: Page, address: str) -> None:
    show(forced, f"{address}/text?text={TEXT}&numbers=1")
    chosen, other = (f".segments input{how} + span" for how in (":checked", ":not(:checked)"))
    assert look(forced, chosen) != look(forced, other)
    switch = ".switch input"
    assert look(forced, switch) != look(forced, switch, "::before")
    show(forced, f"{address}/train?v=49152&d=576")
    pressed = "button[aria-pressed=true]"
    assert look(forced, pressed) != look(forced, "button[aria-pressed=false]")


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/learn?target=4", '[data-chart="gradient"] .fill.down'),
        ("/next?prompt=a", ".ranked .fill"),
        (f"/text?text={TEXT}", ".levels .level-7"),
        ("/lens?prompt=hello", ".legend li:last-child"),
        (f"/compare?what=samplers&where=text&text={TEXT}&ta=0.5", ".legend li:last-child"),
    ],
)
def test_data_are_seen_in_forced_colours(forced: Page, address: str, path: str, shown: str) -> None:
    show(forced, f"{address}{path}")
    ground = look(forced, "body").split(" none")[0]
    colour, _, picture = look(forced, shown).partition(") ")
    assert picture != "none" or f"{colour})" != ground


@pytest.mark.parametrize("path", [PAGES[1], "/compare?prompt=a&what=samplers&ta=0.5&top=40"])
def test_no_word_is_cut_on_a_telephone(here: Page, address: str, path: str) -> None:
    here.set_viewport_size({"width": 390, "height": 900})
    show(here, f"{address}{path}&model=hostile")
    cut = here.locator("tbody .token").evaluate_all(
        """tokens => tokens.filter(token => {
          const { right } = token.getBoundingClientRect();
          const clips = box => box && getComputedStyle(box).overflowX === 'hidden'
            && right > box.getBoundingClientRect().right;
          return clips(token.parentElement) || clips(token.closest('th')) || right > innerWidth;
        }).map(token => token.textContent)"""
    )
    assert cut == []


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_narrowest_screen_scrolls_one_way(
    here: Page, address: str, path: str, lang: str
) -> None:
    here.set_viewport_size({"width": 320, "height": 900})
    show(here, f"{address}{path}{'&' if '?' in path else '?'}lang={lang}&model=llama3")
    assert here.evaluate("() => document.documentElement.scrollWidth") == 320


def luminance(colour: list[float]) -> float:
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_small_numbers_stand_out_from_every_colour(here: Page, address: str, theme: str) -> None:
    show(here, f"{address}/text?text={TEXT}&numbers=1&theme={theme}")
    small = here.locator(".tok small").first
    for level in range(8):
        found: Any = small.evaluate(
            """(small, level) => {
              small.parentElement.className = `tok level-${level}`;
              const rgb = text => text.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255);
              const ground = level ? small.parentElement : document.body;
              return [rgb(getComputedStyle(small).color),
                      rgb(getComputedStyle(ground).backgroundColor)];
            }""",
            level,
        )
        low, high = sorted(map(luminance, found))
        assert (high + 0.05) / (low + 0.05) >= 4.5, level


@pytest.mark.parametrize("width", [1600, 1280, 390])
def test_the_foot_begins_where_the_page_does(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto("/learn")
    left = "e => { const r = document.createRange(); r.selectNodeContents(e);"
    left += " return r.getBoundingClientRect().left }"
    foot, head = (page.locator(name).evaluate(left) for name in ("footer", "h1"))
    assert foot == pytest.approx(head, abs=1)
