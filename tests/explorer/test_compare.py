"""The page Compare: the numbers of the command; an error where models cannot be compared."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, expect
from server.serve_tiny import running
from tiny_models import write_model

from explorer.read_page import api_requests, refusal
from explorer.sites import HOSTILE
from lmhead.cli import main
from lmhead.explorer import page_folder
from lmhead.models import open_model

TEXT = "hello ab cab hello lo"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tokens = [" ", "a", "b", *HOSTILE]
    return {
        "one": write_model(folder / "one"),
        "two": write_model(folder / "two", seed=1),
        "hostile": write_model(folder / "hostile", seed=3, tokens=tokens),
    }


@pytest.fixture(scope="module")
def address(paths: dict[str, Path]) -> Iterator[str]:
    models = {name: open_model(path) for name, path in paths.items()}
    with running(page_folder(), models=models) as port:
        yield f"http://127.0.0.1:{port}"


def opened(page: Page, address: str, shows: str = "totals") -> None:
    page.goto(address)
    page.wait_for_selector(f'[data-chart="{shows}"]')
    ready(page)


def ready(page: Page) -> None:
    expect(page.locator("[role=status][aria-busy=false]")).to_have_count(1)


def run(*arguments: str) -> dict[str, Any]:
    """What a command prints with --json."""
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def totals(page: Page) -> dict[str, float]:
    found = page.locator('[data-chart="totals"] [data-name]').evaluate_all(
        "rows => rows.map(row => [row.dataset.name, row.dataset.value])"
    )
    return {name: float(value) for name, value in found}


def values(page: Page) -> list[float]:
    found = page.locator('[data-chart="map"] [data-at]').evaluate_all(
        "cells => cells.map(cell => cell.dataset.value)"
    )
    return [float(value) for value in found]


def check_totals(found: dict[str, float], want: dict[str, Any]) -> None:
    for name in ("kl", "max_kl", "agreement"):
        expected = math.inf if want[name] is None else want[name]
        assert found[name] == pytest.approx(expected, abs=1e-6), name
    if want["perplexity"] is None:
        assert found["total_variation"] == pytest.approx(want["total_variation"], abs=1e-6)
    else:
        both = [found["perplexity_a"], found["perplexity_b"]]
        assert both == pytest.approx(want["perplexity"], rel=1e-6)


def test_two_models_along_a_text(here: Page, address: str, paths: dict[str, Path]) -> None:
    opened(here, f"{address}/compare?where=text&text={TEXT}")
    options = ("--text", TEXT, "--worst", "99")
    want = run("compare", str(paths["one"]), str(paths["two"]), *options)
    check_totals(totals(here), want)
    places = sorted(want["differences"], key=lambda place: int(place["position"]))
    assert values(here) == pytest.approx([place["kl"] for place in places], abs=1e-6)
    here.locator('.choice input[value="gain"]').check(force=True)
    gains = [place["log_prob_b"] - place["log_prob_a"] for place in places]
    assert values(here) == pytest.approx(gains, abs=1e-6)
    worst = here.locator('[data-chart="place"]').get_attribute("data-at")
    assert worst == str(want["differences"][0]["position"])
    here.locator('[data-chart="numbers"] summary').click()
    rows = here.locator('[data-chart="numbers"] tbody tr')
    expect(rows).to_have_count(len(places))


def test_two_samplers_along_a_text(here: Page, address: str, paths: dict[str, Path]) -> None:
    query = f"what=samplers&where=text&text={TEXT}&ta=0.6&pa=1&ka=9&tb=1.2&ob=llama.cpp&mb=0"
    opened(here, f"{address}/compare?{query}")
    a, b = "temperature=0.6 top_k=9", "temperature=1.2 order=llama.cpp"
    samplers = ("--sampler-a", a, "--sampler-b", b)
    want = run("compare", str(paths["one"]), "--text", TEXT, *samplers, "--worst", "99")
    check_totals(totals(here), want)
    places = sorted(want["differences"], key=lambda place: int(place["position"]))
    assert values(here) == pytest.approx([p["total_variation"] for p in places], abs=1e-6)
    here.locator('[data-do="swap"]').click()
    here.wait_for_function("() => location.search.includes('kb=9')")
    expect(here.locator('[data-chart="totals"] [data-name="kl"] dd')).to_have_text("∞")
    expect(here.locator(".compared")).to_contain_text("KL is infinite")


def test_one_next_token_of_two_models(here: Page, address: str, paths: dict[str, Path]) -> None:
    opened(here, f"{address}/compare?prompt=hello+ab&top=200&sort=apart")
    p, q = (
        {t["id"]: t["p"] for t in run("next", str(paths[m]), "hello ab", "--top", "300")["tokens"]}
        for m in ("one", "two")
    )
    found = totals(here)
    kl = math.fsum(p[id] * math.log(p[id] / q[id]) for id in p)
    assert found["kl"] == pytest.approx(kl, abs=1e-6)
    apart = math.fsum(abs(p[id] - q[id]) for id in p) / 2
    assert found["variation"] == pytest.approx(apart, abs=1e-6)
    rows = here.locator('[data-chart="pairs"] tbody tr').evaluate_all(
        "rows => rows.map(row => [row.dataset.id, row.dataset.a, row.dataset.b].map(Number))"
    )
    assert len(rows) == 200
    for id, a, b in rows:
        assert (a, b) == pytest.approx((p[id], q[id]), abs=1e-6)
    gaps = [abs(a - b) for _, a, b in rows]
    assert gaps == sorted(gaps, reverse=True)


def test_one_next_token_of_two_samplers(here: Page, address: str, paths: dict[str, Path]) -> None:
    """Sliders act in the page alone, and what they make is what the library makes."""
    opened(here, f"{address}/compare?what=samplers&prompt=hello+ab&top=30")
    requests = api_requests(here)
    before = totals(here)
    here.locator('input[name="tb"]').fill("1.5")
    here.locator('input[name="mb"]').fill("0.1")
    here.wait_for_function("() => location.search.includes('mb=0.1')")
    assert requests == []
    found = totals(here)
    assert found["kl"] != before["kl"]
    options = ("--temperature", "1.5", "--min-p", "0.1", "--top", "300")
    want = run("next", str(paths["one"]), "hello ab", *options)
    processed = {token["id"]: token["processed_p"] for token in want["tokens"]}
    rows = here.locator('[data-chart="pairs"] tbody tr').evaluate_all(
        "rows => rows.map(row => [row.dataset.id, row.dataset.b].map(Number))"
    )
    for id, b in rows:
        assert b == pytest.approx(processed[id], abs=1e-6)
    assert found["entropy_b"] == pytest.approx(want["processed"]["entropy"], abs=1e-6)
    # Bars are shares of 1, not of the largest; on the log scale, of six decades.
    widths = """rows => rows.map(row => [Number(row.dataset.b),
      parseFloat(row.querySelectorAll('.fill')[1].style.width) / 100])"""
    bars = here.locator('[data-chart="pairs"] tbody tr')
    assert all(width == pytest.approx(p, abs=1e-6) for p, width in bars.evaluate_all(widths))
    here.get_by_label("log, 10⁻⁶ to 1").check()
    p, width = bars.evaluate_all(widths)[0]
    assert width == pytest.approx(1 + math.log10(p) / 6, abs=1e-6)


def test_every_control_changes_what_it_should(here: Page, address: str) -> None:
    opened(here, f"{address}/compare?what=samplers&prompt=hello+ab")
    for name, value in [("ta", "0.3"), ("ka", "2"), ("pa", "0.4"), ("ma", "0.9"), ("kb", "9")]:
        before = totals(here)
        here.locator(f'input[name="{name}"]').fill(value)
        here.wait_for_function("part => location.search.includes(part)", arg=f"{name}={value}")
        after = totals(here)
        assert (after != before) or name in ("pa", "ma"), name
    before = totals(here)
    here.locator('[data-do="swap"]').click()
    after = totals(here)
    assert after["entropy_a"] == pytest.approx(before["entropy_b"])
    shown = here.locator('[data-chart="pairs"] tbody tr')
    here.locator('.choice input[value="apart"]').check(force=True)
    assert "sort=apart" in here.url
    count = shown.count()
    here.locator('[data-do="more"]').click()
    expect(shown).to_have_count(2 * count)
    here.locator('[data-side="b"] input[value="llama.cpp"]').check(force=True)
    assert "ob=llama.cpp" in here.url
    here.locator("#prompt").fill("ab ab")
    here.get_by_role("button", name="Compare", exact=True).click()
    here.wait_for_function("() => location.search.includes('prompt=ab+ab')")
    ready(here)
    here.locator('.choice input[value="models"]').check(force=True)
    here.wait_for_selector('[data-side="b"] input[value="two"]', state="attached")
    here.locator('[data-side="b"] input[value="one"]').check(force=True)
    expect(here.locator(".compared")).to_contain_text("both sides are the same")
    here.locator('.choice input[value="text"]').check(force=True)
    here.wait_for_selector('[data-chart="map"]')
    here.get_by_role("button", name="Reset").click()
    here.wait_for_selector('[data-chart="pairs"]')


@pytest.mark.parametrize(("lang", "off"), [("en", "off"), ("zh", "关")])
def test_a_cut_that_does_nothing_is_off(here: Page, address: str, lang: str, off: str) -> None:
    opened(here, f"{address}/compare?what=samplers&prompt=hello&pa=0.5&pb=1&ma=0.2&lang={lang}")
    for name, shown in (("pa", "0.5"), ("pb", off), ("ma", "0.2"), ("mb", off)):
        expect(here.locator(f'input[name="{name}"]')).to_have_attribute("aria-valuetext", shown)


def test_different_tokens_are_explained(here: Page, address: str) -> None:
    for where in ("prompt", "text"):
        opened(here, f"{address}/compare?b=hostile&where={where}", "different")
        message = here.locator('[data-chart="different"]')
        expect(message).to_contain_text("These models cannot be compared")
        expect(message).to_contain_text(
            "Token id 262 is “c” in A and “<img␣src=x␣onerror=alert(1)>” in B."
        )
        assert here.locator(".alarm").count() == 0
        assert here.locator("main img, main script").count() == 0
    here.locator('.choice input[value="samplers"]').check(force=True)
    here.wait_for_selector('[data-chart="map"]')
    expect(here.locator('[data-chart="different"]')).to_have_count(0)


def test_hostile_tokens_are_text(here: Page, address: str) -> None:
    text = "<img src=x onerror=alert(2)>\u202e"
    opened(here, f"{address}/compare?what=samplers&a=hostile&prompt={text}&top=200&ta=3&pa=1")
    shown = here.locator('[data-chart="pairs"]')
    expect(shown).to_contain_text(re.compile(r"<img␣src=x␣onerror=alert\(1\)>|⟨202E⟩gnp|\{n\}"))
    opened(here, f"{address}/compare?what=samplers&a=hostile&where=text&text={text}")
    here.locator('[data-at="3"]').hover()
    expect(here.locator("[role=tooltip]")).to_have_count(1)
    assert here.locator("main img, main script").count() == 0


def test_the_keyboard_alone(here: Page, address: str) -> None:
    opened(here, f"{address}/compare?where=text&text={TEXT}&at=1")
    for _ in range(40):
        here.keyboard.press("Tab")
        if here.evaluate("() => document.activeElement.getAttribute('role')") == "option":
            break
    at = "() => document.activeElement.dataset.at"
    last = here.locator('[data-chart="map"] [data-at]').count()
    for key, where in [
        ("ArrowRight", "2"),
        ("ArrowLeft", "1"),
        ("ArrowLeft", "1"),
        ("ArrowDown", str(min(11, last))),
        ("ArrowUp", "1"),
        ("End", str(last)),
        ("Home", "1"),
        ("ArrowRight", "2"),
    ]:
        here.keyboard.press(key)
        assert here.evaluate(at) == where, key
        assert here.locator("[role=tooltip]").get_attribute("data-tip") == where
    here.keyboard.press("Enter")
    expect(here.locator('[data-chart="place"]')).to_have_attribute("data-at", "2")
    assert "at=2" in here.url


def test_a_place_opens_as_a_prompt_and_back_leads_back(here: Page, address: str) -> None:
    opened(here, f"{address}/compare?where=text&text={TEXT}&at=3")
    kl = values(here)[2]
    here.locator('[data-do="open"]').click()
    here.wait_for_selector('[data-chart="pairs"]')
    ready(here)
    assert totals(here)["kl"] == pytest.approx(kl, abs=1e-5)
    here.reload()
    here.wait_for_selector('[data-chart="pairs"]')
    assert totals(here)["kl"] == pytest.approx(kl, abs=1e-5)
    here.go_back()
    here.wait_for_selector('[data-chart="map"]')
    expect(here.locator('[data-chart="place"]')).to_have_attribute("data-at", "3")


def test_with_one_model_its_samplers_are_compared(page: Page, paths: dict[str, Path]) -> None:
    models = {"one": open_model(paths["one"])}
    with running(page_folder(), models=models) as port:
        address = f"http://127.0.0.1:{port}"
        opened(page, f"{address}/compare?what=models")
        expect(page.locator('[data-side="a"] input[name="ta"]')).to_have_count(1)
        expect(page.locator("main")).to_contain_text("Only one model is open")
        page.goto("about:blank")


def test_a_refusal_is_shown(here: Page, address: str, watched: tuple[Page, list[str]]) -> None:
    with refusal(watched):
        here.goto(f"{address}/compare?where=text&text=")
        expect(here.locator(".alarm")).to_contain_text("must have from 2 to")


@pytest.mark.parametrize(
    ("width", "theme", "lang"),  # every pair of values; colours do not change the layout
    [(1280, "light", "en"), (1280, "dark", "zh"), (390, "dark", "en"), (390, "light", "zh")],
)
def test_nothing_is_cut(here: Page, address: str, width: int, theme: str, lang: str) -> None:
    here.set_viewport_size({"width": width, "height": 900})
    title = {"en": "Compare two models or samplers", "zh": "对比两个模型或采样器"}[lang]
    for query in ("", "what=samplers", "where=text", "what=samplers&where=text", "b=hostile"):
        shows = "different" if "hostile" in query else "totals"
        frame = f"text={TEXT}&prompt=hello&lang={lang}&theme={theme}"
        opened(here, f"{address}/compare?{frame}&{query}", shows)
        outside = here.evaluate(
            "() => [...document.querySelectorAll('main *:not(pre code)')].filter(e =>"
            " !e.closest('.gridbox') &&"
            " e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
            ".map(e => e.outerHTML.slice(0, 80))"
        )
        assert outside == []
        assert here.locator("h1").inner_text() == title
