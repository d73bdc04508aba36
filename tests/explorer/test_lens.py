"""The page of the lens: the command's numbers, a grid for mouse and keyboard, tokens as text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, expect
from server.serve_tiny import running
from tiny_models import write_model

from explorer.read_page import refusal
from explorer.sites import HOSTILE
from lmhead.cli import main
from lmhead.explorer import page_folder
from lmhead.models import LanguageModel, open_model

FIELDS = {"p": "target_p", "rank": "target_rank", "entropy": "entropy", "kl": "kl"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def models(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LanguageModel]:
    hostile = write_model(tmp_path_factory.mktemp("hostile"), tokens=[" ", "a", "b", *HOSTILE])
    return {"tiny": open_model(path), "hostile": open_model(hostile)}


@pytest.fixture(scope="module")
def address(models: dict[str, LanguageModel]) -> Iterator[str]:
    with running(page_folder(), models=models) as port:
        yield f"http://127.0.0.1:{port}"


def opened(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector('[data-chart="grid"]')
    ready(page)


def ready(page: Page) -> None:
    expect(page.locator("[role=status][aria-busy=false]")).to_have_count(1)


def command(path: Path, *arguments: str) -> dict[str, Any]:
    """What `lmhead lens --json` prints."""
    result = CliRunner().invoke(main, ["lens", str(path), *arguments, "--json", "--top", "8"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def values(page: Page) -> list[float]:
    found: list[float] = page.locator('[data-chart="grid"] [data-at]').evaluate_all(
        "cells => cells.map(cell => Number(cell.dataset.value))"
    )
    return found


def chosen(page: Page) -> str | None:
    return page.locator('[data-chart="cell"]').get_attribute("data-at")


@pytest.mark.parametrize("by", FIELDS)
def test_the_numbers_are_the_command_s(here: Page, address: str, path: Path, by: str) -> None:
    opened(here, f"{address}/lens?prompt=hello+ab&by={by}&cell=1.2")
    want = command(path, "hello ab")
    cells = [layer["cells"] for layer in want["layers"]]
    flat = [cell[FIELDS[by]] for row in cells for cell in row]
    assert values(here) == pytest.approx(flat, abs=1e-6)
    best = [cell["best"][0]["text"] for row in cells for cell in row]
    shown = here.locator('[data-chart="grid"] [data-at] .token').all_inner_texts()
    assert len(shown) == len(best)
    cell = cells[1][2]
    rows = here.locator('[data-chart="best"] tbody tr')
    shown_best = rows.evaluate_all(
        "rows => rows.map(row => [row.dataset.id, row.dataset.p].map(Number))"
    )
    assert [id for id, _ in shown_best] == [token["id"] for token in cell["best"]]
    assert [p for _, p in shown_best] == pytest.approx(
        [token["p"] for token in cell["best"]], abs=1e-6
    )
    for measure, field in FIELDS.items():
        fact = here.locator(f'[data-chart="facts"] [data-measure="{measure}"]')
        assert float(fact.get_attribute("data-value") or "nan") == pytest.approx(cell[field])


@pytest.mark.parametrize(
    ("by", "scale"),
    [("p", "square-root scale"), ("rank", "log scale"), ("entropy", "nats"), ("kl", "log scale")],
)
def test_the_curve_grows_upwards_and_names_its_scale(
    here: Page, address: str, by: str, scale: str
) -> None:
    here.goto(f"{address}/lens?prompt=hello&by={by}&lang=en")
    curve = here.locator('[data-chart="climb"]')
    expect(curve.locator("figcaption")).to_contain_text(scale)
    ticks = curve.locator(".tick text").evaluate_all(
        "all => all.map(text => [text.textContent, Number(text.getAttribute('y'))])"
    )
    units = {"%": 0.01, "k": 1000.0}
    values = [float(text.rstrip("%k")) * units.get(text[-1], 1) for text, _ in ticks]
    assert len(values) > 1
    # From the largest value to the smallest, each is further down.
    ordered = sorted(zip(values, (y for _, y in ticks), strict=True), reverse=True)
    assert [y for _, y in ordered] == sorted(y for _, y in ordered)


def test_a_token_of_ones_own(here: Page, address: str, path: Path) -> None:
    opened(here, f"{address}/lens?prompt=hello+ab&by=rank")
    before = values(here)
    here.locator("#target-token").fill("ab")
    here.locator('[data-chart="found"] button').first.click()
    expect(here.locator('[data-chart="target"] [data-do="follow"]')).to_have_count(1)
    ready(here)
    want = command(path, "hello ab", "--target", "ab")
    assert f"target={want['targets'][0]['id']}" in here.url
    flat = [cell["target_rank"] for layer in want["layers"] for cell in layer["cells"]]
    assert values(here) == flat != before
    here.locator('[data-chart="best"] button.token-button').nth(1).click()
    old = f"target={want['targets'][0]['id']}"
    here.wait_for_function("old => !location.search.includes(old)", arg=old)
    assert "target=" in here.url
    here.locator('[data-do="follow"]').click()
    expect(here.locator('[data-do="follow"]')).to_have_count(0)
    ready(here)
    assert values(here) == before
    assert "target" not in here.url
    here.locator("#target-token").fill("no such word")
    expect(here.locator('[data-chart="target"]')).to_contain_text("No token has this text.")


def test_every_control_changes_what_it_should(here: Page, address: str) -> None:
    opened(here, f"{address}/lens?prompt=hello+ab")
    legends = set()
    for by in ("entropy", "kl", "rank", "p"):
        here.locator(f'.choice input[value="{by}"]').check(force=True)
        legends.add(here.locator('[data-chart="legend"]').inner_text())
        assert ("by=" in here.url) == (by != "p")
    assert len(legends) == 4
    grid = here.locator('[data-chart="grid"]')
    expect(grid.locator("td small").first).to_be_visible()
    here.locator('input[name="figures"]').click()
    expect(grid.locator("td small")).to_have_count(0)
    assert "figures=0" in here.url
    before = values(here)
    here.locator("#prompt").fill("ab ab ab")
    here.get_by_role("button", name="Show layers").click()
    here.wait_for_function("() => location.search.includes('prompt=ab+ab+ab')")
    ready(here)
    assert values(here) != before
    here.locator("select[name=model]").select_option("hostile")
    here.wait_for_function("() => location.search.includes('model=hostile')")
    here.get_by_role("button", name="Reset").click()
    here.wait_for_function("() => !location.search.includes('prompt')")


def test_the_keyboard_alone(here: Page, address: str) -> None:
    opened(here, f"{address}/lens?prompt=hello+ab&cell=0.0")
    for _ in range(40):
        here.keyboard.press("Tab")
        if here.evaluate("() => document.activeElement.getAttribute('role')") == "gridcell":
            break
    at = "() => document.activeElement.dataset.at"
    assert here.evaluate(at) == "0.0"
    last = here.locator('[data-chart="grid"] tbody tr').first.locator("td").count() - 1
    for key, where in [
        ("ArrowRight", "0.1"),
        ("ArrowDown", "1.1"),
        ("End", f"1.{last}"),
        ("ArrowRight", f"1.{last}"),
        ("Control+Home", "0.0"),
        ("ArrowUp", "0.0"),
        ("Control+End", f"2.{last}"),
        ("ArrowLeft", f"2.{last - 1}"),
        ("ArrowUp", f"1.{last - 1}"),
    ]:
        here.keyboard.press(key)
        assert here.evaluate(at) == where, key
        tip = here.locator("[role=tooltip]")
        assert tip.get_attribute("data-tip") == where
        assert "KL to the last layer" in tip.inner_text()
    assert chosen(here) == "0.0"
    here.keyboard.press("Enter")
    assert chosen(here) == f"1.{last - 1}"
    assert f"cell=1.{last - 1}" in here.url
    here.keyboard.press("ArrowUp")
    here.keyboard.press(" ")
    assert chosen(here) == f"0.{last - 1}"
    here.keyboard.press("Escape")
    expect(here.locator("[role=tooltip]")).to_have_count(0)


def test_reload_and_back(here: Page, address: str) -> None:
    opened(here, f"{address}/lens?prompt=hello+ab&by=kl")
    here.locator('[data-at="1.1"]').click()
    assert chosen(here) == "1.1"
    here.locator('[data-at="2.0"]').click()
    assert chosen(here) == "2.0"
    before = values(here)
    here.reload()
    here.wait_for_selector('[data-chart="grid"]')
    ready(here)
    assert (chosen(here), values(here)) == ("2.0", before)
    here.go_back()
    expect(here.locator('[data-chart="cell"]')).to_have_attribute("data-at", "1.1")
    opened(here, f"{address}/lens?prompt=hello+ab&cell=99.99&by=nonsense&target=-4")
    assert chosen(here) == f"2.{len(before) // 3 - 1}"


def test_the_table_has_every_cell(here: Page, address: str) -> None:
    opened(here, f"{address}/lens?prompt=hello+ab&by=entropy")
    here.locator('[data-chart="numbers"] summary').click()
    cells = here.locator('[data-chart="numbers"] td')
    expect(cells).not_to_have_count(0)
    texts = cells.all_inner_texts()
    assert [float(text.split()[0]) for text in texts] == pytest.approx(values(here), abs=1e-4)


def test_hostile_tokens_are_text(here: Page, address: str) -> None:
    prompt = "<img src=x onerror=alert(2)>\u202e"
    opened(here, f"{address}/lens?model=hostile&prompt={prompt}&target=262")
    assert "<img␣src=x␣onerror=alert(1)>" in here.locator('[data-chart="target"]').inner_text()
    here.locator('[data-chart="numbers"] summary').click()
    here.locator('[data-at="0.1"]').hover()
    here.locator("#target-token").fill("<img")
    expect(here.locator('[data-chart="found"] button')).to_have_count(1)
    assert here.locator("main img, main script").count() == 0


def test_a_refusal_is_shown(here: Page, address: str, watched: tuple[Page, list[str]]) -> None:
    with refusal(watched):
        here.goto(f"{address}/lens?prompt={'hello ' * 300}")
        expect(here.locator(".alarm")).to_contain_text("from 1 to 64 tokens")


CONTRAST = """() => {
  const channel = x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).map(Number)
      .map(x => channel(text.startsWith("color(") ? x : x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return Math.min(...[...document.querySelectorAll(".heat")].map(cell => {
    const {color, backgroundColor} = getComputedStyle(cell);
    const [a, b] = [light(color), light(backgroundColor)].sort();
    return (b + 0.05) / (a + 0.05);
  }));
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_cell_can_be_read(here: Page, address: str, theme: str) -> None:
    """Text on all shades, made as strong as each percent, has a contrast of 4.5 to 1."""
    opened(here, f"{address}/lens?prompt=hello+ab&theme={theme}")
    assert here.evaluate(CONTRAST) >= 4.5
    cells = here.locator(".legend .heat")
    for tone in ("cool", "warm"):
        for percent in range(101):
            # The classes of explorer/src/heat/shade.ts.
            strong = (" high" if percent > 59 else "") + (" deep" if percent > 83 else "")
            cells.evaluate_all(
                "(cells, [name, heat]) => cells.forEach(cell => {"
                " cell.className = name; cell.style.setProperty('--heat', heat) })",
                [f"heat {tone}{strong}", f"{percent}%"],
            )
            assert here.evaluate(CONTRAST.replace(".heat", ".legend .heat")) >= 4.5, (tone, percent)


@pytest.mark.parametrize(
    ("width", "theme", "lang"),  # every pair of values; colours do not change the layout
    [(1280, "light", "en"), (1280, "dark", "zh"), (390, "dark", "en"), (390, "light", "zh")],
)
def test_nothing_is_cut_and_the_layers_stay_in_view(
    here: Page, address: str, width: int, theme: str, lang: str
) -> None:
    here.set_viewport_size({"width": width, "height": 900})
    prompt = "hello ab " * 8
    opened(here, f"{address}/lens?prompt={prompt}&lang={lang}&theme={theme}")
    here.locator('[data-chart="numbers"] summary').click()
    outside = here.evaluate(
        "() => [...document.querySelectorAll('main *:not(pre code)')].filter(e =>"
        " !e.closest('.gridbox') &&"
        " e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    box = here.locator('[data-chart="grid"]')
    name = box.locator("tbody th").first
    assert box.evaluate("box => box.scrollWidth > box.clientWidth")
    places = set()
    for left in (0, 200, 10_000):
        box.evaluate(f"box => box.scrollLeft = {left}")
        places.add(name.evaluate("th => th.getBoundingClientRect().left"))
    assert len(places) == 1
    assert (
        here.locator("h1").inner_text()
        == {
            "en": "How the prediction forms, layer by layer",
            "zh": "预测是怎样逐层形成的",
        }[lang]
    )
