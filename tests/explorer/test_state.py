"""Nothing is lost: the prompt and the state of every page, across menu, reload and history."""

import re
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import torch
from playwright.sync_api import Page, Request, expect
from server.serve_tiny import running

from explorer.read_page import api_requests, opened
from lmhead.explorer import page_folder
from lmhead.models import LanguageModel, open_model

CONTROL = 'input[name="{}"]'


def menu(page: Page, name: str) -> None:
    page.get_by_role("navigation", name="Pages").get_by_role("link", name=name, exact=True).click()


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_page_opens_on_the_live_model_in_one_view(
    here: Page, bilingual: str, lang: str
) -> None:
    here.set_viewport_size({"width": 1280, "height": 800})
    opened(here, f"{bilingual}/?lang={lang}")
    here.wait_for_function("() => location.pathname === '/next'")
    inside = (
        "#prompt",
        '[data-chart="pieces"]',
        '[data-chart="flow"]',
        CONTROL.format("t"),
        CONTROL.format("p"),
        '[data-chart="ranked"] tbody tr:nth-child(5)',
    )
    for selector in inside:
        box = here.locator(selector).bounding_box()
        assert box is not None, selector
        assert box["y"] + box["height"] <= 800, selector
    expect(here.locator('[data-chart="model"] small')).to_contain_text("5,120")
    here.goto(f"{bilingual}/text?lang={lang}")
    here.wait_for_selector(".exports")
    heat = here.locator('[data-chart="heat"]').bounding_box()
    assert heat is not None
    assert heat["y"] + heat["height"] <= 800


def test_without_a_model_it_opens_the_tutorial(page: Page) -> None:
    page.goto("/")
    page.wait_for_function("() => location.pathname === '/learn'")
    expect(page.locator("h1")).to_have_text("How a vector becomes a word")


def test_the_story_has_the_numbers_of_this_prompt(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&t=0.7&p=0.9")
    here.locator('[data-do="how"]').click()
    total = here.locator('[data-chart="terms"] tfoot tr')
    expect(total).to_have_count(1)
    found = total.evaluate("row => [row.dataset.sum, row.dataset.logit].map(Number)")
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    chosen = here.locator('[data-chart="choices"] dd').nth(1).get_attribute("data-id")
    token = here.locator(f'[data-chart="ranked"] tr[data-id="{chosen}"] .token').inner_text()
    expect(here.locator('[data-chart="flow-token"]')).to_have_text(token)
    expect(here.locator('[data-chart="noise"] tr.hit th')).to_have_text(token)
    here.get_by_role("link", name="The whole explanation").click()
    expect(here.locator("h1")).to_have_text("How a vector becomes a word")


def test_prompt_and_settings_survive_the_menu_reload_and_history(here: Page, address: str) -> None:
    opened(here, f"{address}/next")
    here.locator("#prompt").fill("hello ab")
    here.locator("#prompt").press("Control+Enter")
    here.wait_for_function("() => location.search.includes('prompt=hello+ab')")
    here.locator(CONTROL.format("t-exact")).fill("0.5")
    menu(here, "Text")
    expect(here.locator("#prompt")).to_have_value("hello ab")
    here.wait_for_selector('[data-chart="heat"]')
    here.get_by_label("entropy", exact=True).check()
    here.wait_for_function("() => location.search.includes('by=entropy')")
    menu(here, "Next token")
    expect(here.locator(CONTROL.format("t"))).to_have_value("0.5")
    expect(here.locator("#prompt")).to_have_value("hello ab")
    here.reload()
    expect(here.locator(CONTROL.format("t"))).to_have_value("0.5")
    menu(here, "Layers")
    expect(here.locator("#prompt")).to_have_value("hello ab")
    here.go_back()
    expect(here.locator(CONTROL.format("t"))).to_have_value("0.5")
    here.go_back()
    assert "by=entropy" in here.url
    here.go_forward()
    expect(here.locator(CONTROL.format("t"))).to_have_value("0.5")


def test_a_menu_asks_nothing_twice(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello")
    here.wait_for_selector('[data-chart="ranked"]')
    menu(here, "Glossary")
    expect(here.locator("h1")).to_have_text("Glossary")
    requests: list[str] = []

    def note(request: Request) -> None:
        if "/api/" in request.url:
            requests.append(request.url)

    here.on("request", note)
    menu(here, "Next token")
    here.wait_for_selector('[data-chart="ranked"]')
    assert requests == []


def test_what_is_typed_is_marked_and_kept_on_other_pages(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello")
    expect(here.locator(".stale")).to_have_count(0)
    here.locator("#prompt").fill("hello, not sent")
    expect(here.locator(".edited")).to_contain_text("belong to the previous text")
    expect(here.locator(".stale")).to_have_count(1)
    menu(here, "Text")
    expect(here.locator("#prompt")).to_have_value("hello, not sent")
    here.reload()
    expect(here.locator("#prompt")).to_have_value("hello, not sent")
    here.locator("#prompt").fill("hello")
    expect(here.locator(".edited")).to_have_text("")
    expect(here.locator(".stale")).to_have_count(0)


def test_tokens_of_another_prompt_do_not_come_along(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&more=263,264")
    menu(here, "Layers")
    here.locator("#prompt").fill("ab")
    here.locator("#prompt").press("Control+Enter")
    here.wait_for_function("() => location.search.includes('prompt=ab')")
    menu(here, "Next token")
    here.wait_for_selector('[data-chart="ranked"]')
    assert "more=" not in here.url


def test_an_unknown_page_or_model_is_said(
    here: Page, address: str, watched: tuple[Page, list[str]]
) -> None:
    response = here.goto(f"{address}/nowhere")
    assert response is not None
    assert response.status == 404
    watched[1].clear()  # the browser's own line about it
    expect(here.locator("h1")).to_have_text("There is no page at /nowhere.")
    here.get_by_role("link", name="Open the first page").click()
    here.wait_for_selector('[data-chart="ranked"]')
    opened(here, f"{address}/next?model=gpt5")
    expect(here.locator('[data-chart="missing-model"]')).to_contain_text("gpt5 is not open here")


@pytest.fixture
def english(page: Page, models: dict[str, LanguageModel]) -> Iterator[str]:
    """The address of a server with a model that has no Chinese."""
    with running(page_folder(), models={"tiny-en": models["tiny"]}) as port:
        site = f"http://127.0.0.1:{port}"
        yield site
        page.goto("about:blank")


def test_a_model_without_chinese_offers_tiny(page: Page, english: str) -> None:
    page.goto(f"{english}/next?lang=zh")
    expect(page.locator('[data-chart="no-chinese"]')).to_contain_text("lmhead explore tiny")
    page.goto(f"{english}/next?lang=en")
    page.wait_for_selector('[data-chart="ranked"]')
    expect(page.locator('[data-chart="no-chinese"]')).to_have_count(0)


def test_the_header_is_one_line_on_a_phone(here: Page, address: str) -> None:
    here.set_viewport_size({"width": 390, "height": 844})
    opened(here, f"{address}/next")
    box = here.locator("header.frame").bounding_box()
    assert box is not None
    assert box["height"] < 56
    expect(here.locator(".model-line")).to_contain_text("300 tokens")
    # The menu scrolls sideways to where the reader is.
    here.goto(f"{address}/glossary")
    link = here.locator(".frame nav [aria-current]")
    expect(link).to_have_text("Glossary")
    here.wait_for_function(
        "() => { const e = document.querySelector('.frame nav [aria-current]');"
        " const right = e => e.getBoundingClientRect().right;"
        " return e && right(e) <= right(e.parentElement) + 1 }"
    )
    here.get_by_role("button", name="Settings").click()
    here.locator(".settings").get_by_label("中文").check()
    expect(here.locator("html")).to_have_attribute("lang", "zh-Hans")


def test_temperature_and_bars_are_on_the_first_screen_of_a_phone(here: Page, address: str) -> None:
    here.set_viewport_size({"width": 390, "height": 844})
    opened(here, f"{address}/next")
    for part in ("#prompt", "[name=quick-t]", "[name=quick-p]", ".ranked tbody tr:nth-child(5)"):
        box = here.locator(part).bounding_box()
        assert box is not None, part
        assert box["y"] + box["height"] <= 844, part
    bars = here.locator('[data-chart="ranked"] tbody tr')
    before = bars.first.get_attribute("data-processed")
    here.locator("[name=quick-t]").fill("0.5")
    expect(here.locator('input[name="t"]')).to_have_value("0.5")
    assert bars.first.get_attribute("data-processed") != before
    here.set_viewport_size({"width": 1280, "height": 800})
    expect(here.locator("[name=quick-t]")).to_be_hidden()


def test_branches_with_the_same_end_are_distinguished(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&more=263&branches=263.*.263")
    names = here.locator('[data-chart="branches"] .open').all_inner_texts()
    assert [name.split()[0] for name in names] == ["1", "2", "3"]
    assert len(set(names)) == 3


def test_the_layers_open_at_the_left(here: Page, address: str) -> None:
    here.goto(f"{address}/lens?prompt={'hello ' * 10}")
    grid = here.locator(".gridbox").first
    grid.wait_for()
    assert grid.evaluate("box => [box.scrollLeft, box.scrollWidth > box.clientWidth]") == [0, True]


def test_a_picture_says_model_prompt_settings_and_date(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello+ab&t=0.5&p=0.9")
    here.wait_for_selector(".exports")
    with here.expect_download() as saved:
        here.locator('[data-export="svg"]').click()
    picture = saved.value.path().read_text(encoding="utf-8")
    today = datetime.now(UTC).date().isoformat()
    for text in ("Model: tiny", "Prompt: hello ab", "temperature=0.5, top_p=0.9, order=hf", today):
        assert text in picture


def test_an_export_names_the_text_it_was_made_from(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello+ab&t=0.5&more=264")
    here.locator("#prompt").fill("typed, not submitted")
    for kind in ("svg", "html"):
        with here.expect_download() as saved:
            here.locator(f'[data-export="{kind}"]').click()
        text = saved.value.path().read_text(encoding="utf-8")
        assert "typed" not in text
        assert re.search(r"Prompt: hello ab.", text)  # with the generated token
        assert "temperature=0.5" in text


def test_the_picture_of_the_prediction_has_the_drawn_token(here: Page, bilingual: str) -> None:
    opened(here, f"{bilingual}/next?lang=en&seed=0")
    token = here.locator('[data-chart="flow-token"]')
    rows = here.locator('[data-chart="flow"] .flow-row.drawn .token')
    expect(rows).to_have_count(1)
    here.wait_for_load_state("networkidle")
    expect(rows).to_have_text([token.inner_text()])
    drawn = token.inner_text()
    ranked = here.locator('[data-chart="ranked"] th .token').all_inner_texts()
    assert drawn not in ranked[:5]  # else this shows nothing
    row = here.locator('[data-chart="flow"] .flow-row.drawn')
    expect(row.locator(".flow-cells i")).to_have_count(32)  # its products
    # Another seed draws another token; its weights are requested, and the model is not run.
    requests = api_requests(here)
    for seed in range(1, 20):
        here.locator('input[name="seed"]').fill(str(seed))
        expect(here).to_have_url(re.compile(f"seed={seed}$"))
        if token.inner_text() not in [drawn, *ranked[:5]]:
            break
    assert token.inner_text() not in [drawn, *ranked[:5]]
    expect(row.first.locator(".token")).to_have_text(token.inner_text())
    cells = row.first.locator(".flow-cells i")
    expect(cells).to_have_count(32)
    assert requests == []
    # Each cell is as strong as its product of weight and hidden number, the largest has 1.
    id = int(here.locator('[data-chart="choices"] dd').last.get_attribute("data-id") or "")
    model = open_model("tiny")
    assert model.tokenizer is not None
    ids = torch.tensor([model.tokenizer.encode(here.locator("#prompt").input_value())])
    with torch.no_grad():
        products = (model.hidden(ids)[0][0, -1] * model.head.weight[id])[:32].double()
    shown = cells.evaluate_all("cells => cells.map(c => [c.className, Number(c.style.opacity)])")
    assert [name == "down" for name, _ in shown] == (products < 0).tolist()
    strength = products.abs() / products.abs().max()
    assert [opacity for _, opacity in shown] == pytest.approx(strength.tolist(), abs=1e-3)


def test_a_token_that_cannot_be_seen_has_a_name(here: Page, bilingual: str) -> None:
    """In the lens, parts of characters are bytes; nowhere is a token blank or U+FFFD."""
    here.goto(f"{bilingual}/lens?prompt=明月几时有，把酒问青&lang=zh")
    here.wait_for_selector('[data-chart="best"]')
    here.wait_for_function("() => !document.querySelector('[aria-busy=true]')")
    tokens = here.locator("main bdi.token").all_inner_texts()
    assert any("⟨E6⟩" in token for token in tokens)
    assert not [token for token in tokens if "\ufffd" in token or not token.strip()]
