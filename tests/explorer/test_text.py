"""The page of a text: its numbers are the library's, and everything can be reached by keyboard."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect
from server.serve_tiny import running

from explorer.read_page import refusal
from explorer.sites import ELEMENT, HOSTILE, saved, site_models
from explorer.test_export import assert_near, copied, shell
from explorer.test_python import run
from lmhead.analysis import Score, next_tokens, score
from lmhead.analysis.score import windows
from lmhead.cli import _json
from lmhead.explorer import page_folder
from lmhead.models import LanguageModel
from lmhead.server import Limits

Watched = tuple[Page, list[str]]
TEXT = "hello ab 你好 hello\nab"
LONG = "hello ab\r\n" * 400  # 1,200 tokens and more


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, LanguageModel], Any]:
    return site_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def model(opened: tuple[dict[str, LanguageModel], Any]) -> LanguageModel:
    return opened[0]["tiny"]


@pytest.fixture(scope="module")
def address(opened: tuple[dict[str, LanguageModel], Any]) -> Iterator[str]:
    models, given = opened
    limits = Limits(text_tokens=3000)
    with running(page_folder(), models=models, given=given, limits=limits) as port:
        yield f"http://127.0.0.1:{port}"


def show(page: Page, address: str, **query: str) -> None:
    fields = "&".join(f"{name}={quote(value)}" for name, value in query.items())
    page.goto(f"{address}/text?{fields}")
    read(page)


def read(page: Page) -> None:
    idle = page.locator('[role="status"][aria-busy=false]')
    expect(idle).to_have_count(1, timeout=30_000)  # a long text on a busy machine
    page.wait_for_selector('[data-chart="heat"]')


def values(page: Page, where: str) -> list[float]:
    found: list[str] = page.locator(where).evaluate_all("all => all.map(e => e.dataset.value)")
    return [float(value) for value in found]


def whole(model: LanguageModel, text: str) -> dict[str, Any]:
    tokens: list[dict[str, Any]] = []
    result = score(model, text, on_token=lambda token: tokens.append(token.to_json()))
    return {"tokens": tokens, **result.to_json()}


@pytest.mark.parametrize("by", ["bits", "entropy", "rank", "p"])
def test_every_token_and_every_sum_is_the_library_s(
    here: Page, address: str, model: LanguageModel, by: str
) -> None:
    show(here, address, text=TEXT, by=by)
    want = whole(model, TEXT)
    unit = {"entropy": math.log(2)}  # the page has bits throughout, the library nats
    expected = [token[by] / unit.get(by, 1) for token in want["tokens"]]
    assert values(here, '[data-chart="heat"] [data-value]') == pytest.approx(expected, abs=1e-6)
    for name in ("perplexity", "bits_per_byte", "bits_per_token", "entropy", "first_choices"):
        value = want[name] / unit.get(name, 1)
        assert values(here, f'[data-sum="{name}"]') == pytest.approx([value], rel=1e-6)
    units = here.locator(
        '[data-chart="readout"] .unit, [data-chart="sums"] .note'
    ).all_inner_texts()
    assert "nats" not in " ".join(units)
    bits = [token["bits"] for token in want["tokens"]]
    order = sorted(range(len(bits)), key=lambda at: -bits[at])
    worst = here.locator('[data-chart="worst"] tbody tr').evaluate_all(
        "rows => rows.map(row => Number(row.dataset.position) - 1)"
    )
    assert worst == order[:12]


def test_a_surprise_is_shown_with_the_text_from_its_first_token(here: Page, bilingual: str) -> None:
    here.goto(f"{bilingual}/text?prompt=In+the+beginning+God&lang=en")
    row = here.locator('[data-chart="worst"] [data-position="2"]')
    expect(row.locator("th")).to_have_text("In the beginning")
    # The space in front of a word is not underlined: at the end of a line it would be a mark alone.
    expect(row.locator(".that")).to_have_text("beginning", use_inner_text=True)
    assert row.locator(".that").text_content() == "beginning"


def test_what_was_expected_is_no_surprise(here: Page, bilingual: str) -> None:
    """The model's first choice, or a token with more than half of the probability, is left out."""
    here.goto(f"{bilingual}/text?prompt=In+the+beginning+God+created+the+heaven&lang=en")
    read(here)
    here.locator(".all summary").click()
    rows = here.locator('[data-chart="tokens"] tbody tr')
    expect(rows.first).to_be_visible()
    bits = [float(cell) for cell in rows.locator("td:nth-of-type(2)").all_inner_texts()]
    ranks = [
        int(cell.replace(",", "")) for cell in rows.locator("td:nth-of-type(4)").all_inner_texts()
    ]
    assert min(bits) < 1  # else this shows nothing
    assert any(bit >= 1 and rank == 1 for bit, rank in zip(bits, ranks, strict=True))
    shown = here.locator('[data-chart="worst"] tbody td:nth-of-type(1)').all_inner_texts()
    expected = [bit for bit, rank in zip(bits, ranks, strict=True) if bit >= 1 and rank > 1]
    assert sorted(map(float, shown)) == sorted(expected)


def test_no_token_is_broken_where_it_fits(here: Page, bilingual: str) -> None:
    text = "In+the+beginning+God+created+the+heaven+and+the+earth"
    here.goto(f"{bilingual}/text?prompt={text}&lang=en")
    read(here)
    here.locator('[data-chart="heat"] .tok').last.click()
    tokens = here.locator('[data-chart="distribution"] th .token')
    expect(tokens.first).to_be_visible()
    lines = "all => all.map(one => one.getClientRects().length)"
    heights = "all => all.map(one => one.getBoundingClientRect().height)"
    assert max(map(len, tokens.all_inner_texts())) >= 8  # else this shows nothing
    assert set(tokens.evaluate_all(lines)) == {1}
    assert len({round(height) for height in tokens.evaluate_all(heights)}) == 1


def test_levels_have_numbers_a_legend_and_a_table(here: Page, address: str) -> None:
    show(here, address, text=TEXT, lang="en")
    expect(here.locator('[data-chart="legend"] li')).to_have_count(8)
    expect(here.locator('[data-chart="legend"] li').first).to_have_text("< 1")
    count = here.locator('[data-chart="heat"] .tok:not(.unscored)').count()
    expect(here.locator('[data-chart="heat"] small')).to_have_count(0)
    here.get_by_role("switch", name="Numbers below the tokens").click()
    expect(here.locator('[data-chart="heat"] small')).to_have_count(count)
    here.locator('input[value="p"]').check()
    expect(here.locator('[data-chart="legend"] li').first).to_have_text("≥ 0.5")
    assert "by=p" in here.url
    here.locator(".all summary").click()
    expect(here.locator('[data-chart="tokens"] tbody tr')).to_have_count(count)
    here.go_back()
    expect(here.locator('[data-chart="legend"] li').first).to_have_text("< 1")
    here.go_back()
    expect(here.locator('[data-chart="heat"] small')).to_have_count(0)


def test_a_character_in_several_tokens_is_shown_once(here: Page, address: str) -> None:
    show(here, address, text="你好")
    shown = here.locator('[data-chart="heat"] .tok bdi').all_inner_texts()
    assert shown[-4:] == ["你", "好", "⟨A5⟩", "⟨BD⟩"]  # 好 is no token of this model: three bytes
    expect(here.locator('[data-chart="rest"]')).to_contain_text(
        "⟨A5⟩: a mark like this is the rest of a character"
    )
    here.locator("#token-5").click()
    expect(here.locator(".drawer .context bdi")).to_have_text("<bos>∅你好")
    worst = here.locator('[data-chart="worst"] [data-position="5"] .spot')
    assert worst.inner_text().endswith("你好⟨BD⟩")


@pytest.mark.parametrize("position", [3, 90])
def test_a_token_opens_with_the_distribution_it_came_from(
    here: Page, address: str, model: LanguageModel, position: int
) -> None:
    text = "hello ab " * 30
    show(here, address, text=text)
    here.locator(f"#token-{position}").click()
    expect(here.locator('[data-chart="distribution"]')).to_be_visible()
    assert f"at={position}" in here.url
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(text)
    seen = score(model, text)
    done = 0
    for window, fresh in windows([ids], seen.window, seen.stride):
        done += fresh
        if done >= position:
            context = window[: len(window) - (done - position) - 1]
            break
    want = next_tokens(model, context, top=10)
    rows = here.locator('[data-chart="distribution"] tbody tr')
    shown = rows.evaluate_all("rows => rows.map(row => [+row.dataset.id, +row.dataset.p])")
    expected = [[token.piece.id, token.p] for token in want.tokens]
    assert_near(shown[:10], expected)
    own = here.locator("tr.own")
    expect(own).to_have_count(1)
    assert int(own.get_attribute("data-id") or -1) == ids[position]
    p = float(own.get_attribute("data-p") or -1)
    (scored,) = values(here, '.drawer [data-figure="p"]')
    assert p == pytest.approx(scored, abs=1e-6)
    here.reload()
    expect(here.locator("tr.own")).to_have_count(1)
    link = here.get_by_role("link", name="Continue from here")
    if position > seen.window:
        expect(link).to_have_count(0)  # the text before it is more than the model can see
    else:
        link.click()
        here.wait_for_selector('[data-chart="ranked"]')
        expect(here.locator("#prompt")).to_have_value(re.compile("^hello"))
        here.go_back()
        expect(here.locator("tr.own")).to_have_count(1)
    here.locator('[data-do="close"]').click()
    expect(here.locator(".drawer")).to_have_count(0)


def test_the_keyboard_alone(here: Page, address: str) -> None:
    show(here, address, text="hello ab " * 40)
    here.locator("#prompt").focus()
    here.keyboard.press("Control+A")
    here.keyboard.type("ab hello " * 40)
    here.keyboard.press("Tab")
    here.keyboard.press("Enter")
    here.wait_for_function("() => location.search.includes('prompt=ab+hello')")
    read(here)
    box = here.locator('[data-chart="heat"]')
    box.focus()
    expect(box).to_have_attribute("aria-activedescendant", "token-1")
    for key, want in (("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("Home", 1)):
        here.keyboard.press(key)
        expect(box).to_have_attribute("aria-activedescendant", f"token-{want}")
    here.keyboard.press("ArrowDown")
    below = int((box.get_attribute("aria-activedescendant") or "").split("-")[1])
    tops = [here.locator(f"#token-{at}").bounding_box() for at in (1, below)]
    assert tops[0] is not None
    assert tops[1] is not None
    assert tops[1]["y"] > tops[0]["y"] + 10
    here.keyboard.press("ArrowUp")
    expect(box).to_have_attribute("aria-activedescendant", "token-1")
    here.keyboard.press("End")
    here.keyboard.press("Enter")
    last = here.locator('[data-chart="heat"] .tok').count() - 1
    assert f"at={last}" in here.url
    expect(here.locator(f"#token-{last}")).to_have_attribute("aria-selected", "true")
    expect(box).to_be_focused()
    here.keyboard.press("Escape")
    expect(here.locator(".drawer")).to_have_count(0)
    expect(box).to_be_focused()
    here.keyboard.press("Enter")
    for leave in ("Escape", "Enter"):
        here.locator('[data-do="close"]').focus()
        here.keyboard.press(leave)
        expect(here.locator(".drawer")).to_have_count(0)
        expect(box).to_be_focused()
        expect(box).to_have_attribute("aria-activedescendant", f"token-{last}")
        spot = here.locator('[data-chart="worst"] .spot').nth(3)
        spot.focus()
        here.keyboard.press("Enter")
        expect(here.locator(".drawer")).to_have_count(1)
        here.locator('[data-do="close"]').focus()
        here.keyboard.press(leave)
        expect(spot).to_be_focused()
        box.focus()
        here.keyboard.press("Enter")


def test_a_drawer_of_the_address_gives_the_focus_to_its_token(here: Page, address: str) -> None:
    show(here, address, text=TEXT, at="3")
    here.locator('[data-do="close"]').focus()
    here.keyboard.press("Escape")
    box = here.locator('[data-chart="heat"]')
    expect(box).to_be_focused()
    expect(box).to_have_attribute("aria-activedescendant", "token-3")


def test_pointing_shows_the_figures(here: Page, address: str, model: LanguageModel) -> None:
    show(here, address, text=TEXT, theme="dark", lang="zh")
    here.locator("#token-4").hover()
    token = whole(model, TEXT)["tokens"][3]
    for name in ("bits", "entropy", "rank", "p"):
        where = f'[data-chart="readout"] [data-figure="{name}"]'
        value = token[name] / (math.log(2) if name == "entropy" else 1)
        assert values(here, where) == pytest.approx([value], abs=1e-6)


def test_a_file_is_read_unchanged(here: Page, address: str, model: LanguageModel) -> None:
    show(here, address)
    file = {"name": "über.txt", "mimeType": "text/plain", "buffer": LONG.encode()}
    here.locator('input[type="file"]').set_input_files(file)  # type: ignore[arg-type]
    expect(here.locator('[data-chart="kept"]')).to_be_visible()
    read(here)
    want = whole(model, LONG)
    assert want["scored_tokens"] > 1000
    expect(here.locator('[data-chart="heat"] .tok')).to_have_count(want["scored_tokens"] + 1)
    assert values(here, '[data-sum="perplexity"]') == pytest.approx([want["perplexity"]], rel=1e-6)
    assert "prompt=" not in here.url
    assert "held=" in here.url
    # An unedited text keeps its line ends, which the text field does not show.
    here.get_by_role("button", name="Score the text").click()
    assert "file=" in here.url
    here.reload()
    read(here)
    assert values(here, '[data-sum="perplexity"]') == pytest.approx([want["perplexity"]], rel=1e-6)
    (line,) = [copied(here, "command")]
    assert line.endswith("'über.txt'")
    here.go_back()
    expect(here.locator('[data-chart="kept"]')).to_have_count(0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "café".encode("latin-1"), "latin.txt is not UTF-8 text"),
        ("picture.png", b"\x89PNG\0\0", "picture.png is not UTF-8 text"),
        ("book.txt", b"a" * (513 << 10), "book.txt is 513 KB; this page accepts at most 512 KB"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(
    here: Page, address: str, name: str, content: bytes, message: str
) -> None:
    show(here, address, text=TEXT)
    file = {"name": name, "mimeType": "text/plain", "buffer": content}
    here.locator('input[type="file"]').set_input_files(file)  # type: ignore[arg-type]
    expect(here.get_by_role("alert")).to_contain_text(message)
    expect(here.locator("#prompt")).to_have_value(TEXT)


def test_too_many_tokens_are_reported_and_the_beginning_offered(
    here: Page, address: str, watched: Watched
) -> None:
    show(here, address)
    here.locator("#prompt").fill("ab cd " * 1500)
    with refusal(watched):
        here.get_by_role("button", name="Score the text").click()
        expect(here.locator(".status p")).to_contain_text("from 2 to 3,000 tokens")
    here.locator('[data-do="begin"]').click()
    read(here)
    assert 2000 < here.locator('[data-chart="heat"] .tok').count() <= 3000


def test_a_link_to_a_long_text_of_another_tab_says_so(here: Page, address: str) -> None:
    here.goto(f"{address}/text?held=1-2-3&lang=zh")
    expect(here.get_by_role("alert")).to_contain_text("另一个标签页")
    expect(here.locator('[data-chart="heat"]')).to_have_count(0)


def test_hostile_tokens_are_text(here: Page, address: str) -> None:
    text = f"a {ELEMENT} {HOSTILE[2]} {HOSTILE[0]}"
    show(here, address, model="hostile", text=text, at="3")
    shown = here.locator('[data-chart="heat"] .tok').all_inner_texts()
    assert ELEMENT in shown
    assert "⟨202E⟩" in shown
    assert here.locator("main img, main script").count() == 0
    report = saved(here, "html").read_text()
    assert "<td>&lt;img&gt;</td>" in report
    assert not re.search(r"<img|<script(?! type=\"application/json\"| nonce=)", report)
    picture = saved(here, "svg").read_text()
    assert ">&lt;img&gt;</text>" in picture
    assert "\u202e" not in picture


def test_exports_are_the_command_s(here: Page, address: str, model: LanguageModel) -> None:
    show(here, address, text=TEXT)
    got = json.loads(saved(here, "json").read_text())
    sizes = {"name": "tiny", "vocab_size": 300, "hidden_size": 16, "max_length": 64}
    sizes["engine"] = model.engine
    want = {**_json.head("score"), "model": sizes, **whole(model, TEXT)}
    assert_near(got, want)
    *_, (perplexity, bits_per_byte) = run(copied(here, "python"), {})
    assert perplexity == pytest.approx(want["perplexity"], rel=1e-6)
    assert bits_per_byte == pytest.approx(want["bits_per_byte"], rel=1e-6)
    line = copied(here, "command")
    printed = json.loads(shell(line.replace("lmhead score", "lmhead score --json", 1)))
    # The command also says the conventions of its perplexity.
    shared = {key: value for key, value in printed.items() if key in want}
    assert_near(shared, {**want, "model": printed["model"]})


def test_the_line_for_a_file_runs_beside_it(
    here: Page, address: str, model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("-a book's.txt")
    file.write_bytes(TEXT.encode())
    show(here, address)
    here.locator('input[type="file"]').set_input_files(tmp_path / file)
    here.wait_for_function("() => location.search.includes('file=')")
    read(here)
    want = score(model, TEXT)
    scope: dict[str, Any] = {}
    run(copied(here, "python"), scope)
    assert isinstance(scope["result"], Score)
    assert scope["result"].perplexity == pytest.approx(want.perplexity, rel=1e-6)
    line = copied(here, "command")
    printed = json.loads(shell(line.replace("lmhead score", "lmhead score --json", 1)))
    assert printed["perplexity"] == pytest.approx(want.perplexity, rel=1e-6)


@pytest.mark.parametrize(
    ("width", "theme", "lang"),  # every pair of values; colours do not change the layout
    [(1280, "light", "en"), (1280, "dark", "zh"), (390, "dark", "en"), (390, "light", "zh")],
)
def test_nothing_is_cut(here: Page, address: str, width: int, lang: str, theme: str) -> None:
    here.set_viewport_size({"width": width, "height": 900})
    query = {"lang": lang, "theme": theme, "model": "hostile", "numbers": "1", "at": "3"}
    show(here, address, text=" ".join(HOSTILE) + "x" * 200, **query)
    expect(here.locator('[data-chart="distribution"]')).to_be_visible()
    outside = here.evaluate(
        "() => [...document.querySelectorAll('main *:not(.unseen, pre code)')].filter(e =>"
        " e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
