"""The page of the next word: its numbers are the library's, and no token of a model is obeyed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama2c_files import (
    random_weights,
    tiny_model,
    vocabulary,
    write_checkpoint,
    write_vocabulary,
)
from playwright.sync_api import Page, expect
from server.asking import running

from lmhead import Sampler
from lmhead.analysis import next_words
from lmhead.explorer import page_folder
from lmhead.models import LanguageModel, load_llama2c

Watched = tuple[Page, list[str]]
HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "\u202egnp", "{n}"]


def hostile_model(folder: Path) -> LanguageModel:
    """Words that a careless page would obey."""
    folder.mkdir()
    write_vocabulary(folder / "tok300.bin", vocabulary([" ", "a", "b", *HOSTILE]))
    return load_llama2c(write_checkpoint(folder / "tiny.bin", random_weights(3)))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    folder = tmp_path_factory.mktemp("models")
    return {"tiny": tiny_model(folder), "hostile": hostile_model(folder / "hostile")}


@pytest.fixture(scope="module")
def address(models: dict[str, LanguageModel]) -> Iterator[str]:
    with running(page_folder(), models=models) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def here(page: Page, address: str) -> Iterator[Page]:
    """The page may ask this server too."""
    page.route(f"{address}/**", lambda route: route.continue_())
    yield page
    page.goto("about:blank")  # what is still being asked is given up
    page.unroute(f"{address}/**")


def numbers(page: Page, field: str) -> list[float]:
    found: list[float] = page.locator('[data-chart="ranked"] tbody tr').evaluate_all(
        f"rows => rows.map(row => Number(row.dataset.{field}))"
    )
    return found


def opened(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector('[data-chart="ranked"]')
    expect(page.locator("[aria-busy=false]")).to_have_count(1)


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("t=0.8&p=0.9", {"temperature": 0.8, "top_p": 0.9}),
        ("t=1.5&k=20&m=0.2", {"temperature": 1.5, "top_k": 20, "min_p": 0.2}),
        (
            "t=0.5&k=9&p=0.7&order=llama.cpp",
            {"temperature": 0.5, "top_k": 9, "top_p": 0.7, "order": "llama.cpp"},
        ),
    ],
)
def test_the_numbers_are_the_library_s(
    here: Page,
    address: str,
    models: dict[str, LanguageModel],
    query: str,
    options: dict[str, Any],
) -> None:
    opened(here, f"{address}/next?prompt=hello+hello&top=30&seed=5&{query}")
    want = next_words(models["tiny"], "hello hello", top=30, sampler=Sampler(seed=5, **options))
    assert numbers(here, "id") == [token.piece.id for token in want.tokens]
    assert numbers(here, "p") == pytest.approx([token.p for token in want.tokens], abs=1e-6)
    processed = [token.processed_p for token in want.tokens]
    assert numbers(here, "processed") == pytest.approx(processed, abs=1e-6)
    assert want.processed is not None
    last = here.locator('[data-chart="stages"] tbody tr').last.inner_text().split()
    if options.get("order") != "llama.cpp":
        assert int(last[1]) == want.processed.words
    assert f"{want.entropy:.4f}" in here.locator('[data-chart="entropy"]').inner_text()
    said = here.locator('[data-chart="says"] dd').last.get_attribute("data-id")
    assert said == str(want.processed.token.id)


def test_sliders_ask_nobody_and_words_can_be_taken_and_undone(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello")
    asked: list[str] = []
    here.on("request", lambda request: asked.append(request.url))
    before = numbers(here, "processed")
    here.locator('input[name="t"]').fill("0.3")
    expect(here.locator('[data-chart="stages"] tbody tr')).to_have_count(2)
    assert numbers(here, "processed") != before
    assert asked == []
    pieces = here.locator('[data-chart="pieces"] .piece')
    count = pieces.count()
    here.locator('[data-chart="ranked"] button.word').nth(2).click()
    expect(pieces).to_have_count(count + 1)
    here.get_by_role("button", name="Undo the last word").click()
    expect(pieces).to_have_count(count)
    here.go_back()
    expect(pieces).to_have_count(count + 1)
    here.locator("#prompt").fill("ab ab")
    here.get_by_role("button", name="Read").click()
    here.wait_for_function("() => location.search.includes('prompt=ab+ab')")
    assert "more" not in here.url


def test_hostile_tokens_are_text(here: Page, address: str) -> None:
    opened(here, f"{address}/next?model=hostile&top=300&prompt=<img src=x onerror=alert(2)>")
    expect(here.locator('[data-chart="ranked"] tbody tr')).to_have_count(300)
    shown = here.locator('[data-chart="ranked"]').inner_text()
    assert "<img␣src=x␣onerror=alert(1)>" in shown
    assert "⟨202E⟩gnp" in shown
    assert here.locator("main img, main script").count() == 0


def test_a_refusal_is_shown(here: Page, address: str, watched: Watched) -> None:
    here.goto(f"{address}/next?prompt={'hello ' * 300}")
    expect(here.locator(".alarm")).to_contain_text("at most 64 tokens")
    (heard,) = watched[1]
    assert "400" in heard  # the browser's own line about the answer
    watched[1].clear()


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut(here: Page, address: str, width: int) -> None:
    here.set_viewport_size({"width": width, "height": 900})
    opened(here, f"{address}/next?model=hostile&top=300&lang=zh&theme=dark")
    here.locator("#find").fill("a")
    outside = here.evaluate(
        "() => [...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right"
        " > document.documentElement.clientWidth + 1).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
