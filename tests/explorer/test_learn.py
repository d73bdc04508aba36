"""The Learn page in a browser: every control moves what it should, by mouse and by keyboard."""

import re
from collections.abc import Callable

import numpy as np
import pytest
from playwright.sync_api import Page, expect

Act = Callable[[Page], None]


def slide(name: str, value: float) -> Act:
    return lambda page: page.locator(f'input[name="{name}"]').fill(str(value))


def choose(step: str, text: str) -> Act:
    return lambda page: page.locator(f"#{step}").get_by_label(text, exact=True).check()


def press(selector: str) -> Act:
    return lambda page: page.locator(selector).click()


def rest(page: Page, part: str) -> None:
    """Wait until the address holds this."""
    page.wait_for_function("part => location.search.includes(part)", arg=part)


# Charts of steps that follow the others; `test_more_controls` has their own.
MORE = [
    "backward",
    "grad-hidden",
    "jacobian",
    "whylogits",
    "biased",
    "attention",
    "greedy",
    "shapes",
    "relu",
    "norm-layer",
    "norm-rms",
    "norm-add",
    "sublayer",
    "weight-1",
    "weight-2",
    "weight-3",
    "positions",
]


def charts(page: Page) -> dict[str, str]:
    """The text of every chart, by its name."""
    found: dict[str, str] = page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('[data-chart]')]"
        ".map(chart => [chart.dataset.chart, chart.textContent]))"
    )
    for name in ("history", *MORE):
        found.pop(name, None)
    return found


# One after another: what a control does, the charts that must change, and those that may.
CONTROLS: list[tuple[Act, str, str]] = [
    (choose("linear", "tied"), "tying", ""),
    (choose("linear", "Llama 3 8B"), "tying", ""),
    (slide("c", 5), "shifted", ""),
    (slide("big", 90), "stable", ""),
    (choose("stable", "float16"), "", "stable"),
    (slide("t", 0.5), "warm", ""),
    (press('[data-order="llama.cpp"]'), "left shares", "drawn"),
    (slide("top_p", 0.6), "left shares orders", "drawn"),
    (press('input[name="use-top_p"]'), "left shares orders", "drawn"),
    (slide("seed", 1), "drawn", "shares"),
    (choose("draw", "1,000"), "drawn shares", ""),
    (choose("loss", "taxes"), "loss gradient", ""),
    (slide("eps", 0.5), "loss gradient", ""),
    (press('[data-do="step"]'), "loss gradient steps", ""),
    (slide("rate", 0.3), "loss gradient", ""),
    (slide("x1", -2), "plain softmax3 sigmoid", ""),
    (press('[data-do="shift"]'), "plain sigmoid", ""),
    (choose("tree", "rain"), "product", ""),
    (
        press('input[name="norm"]'),
        "given normed dots shifted softmax stable warm left shares loss gradient product leaves",
        "drawn orders",
    ),
    (slide("stretch", 4), "given softmaxed", ""),  # what follows a layer norm does not notice
]


def test_every_control_changes_what_it_should_and_can_be_taken_back(page: Page) -> None:
    page.goto("/learn")
    states = [charts(page)]
    for number, (act, must, may) in enumerate(CONTROLS):
        address = page.url
        act(page)
        page.wait_for_function("old => location.href !== old", arg=address)
        states.append(charts(page))
        changed = {name for name, text in states[-1].items() if text != states[-2][name]}
        assert set(must.split()) <= changed <= set((must + " " + may).split()), number
    page.reload()
    assert charts(page) == states[-1]
    for before in reversed(states[:-1]):
        address = page.url
        page.go_back()
        page.wait_for_function("old => location.href !== old", arg=address)
        assert charts(page) == before
    page.go_forward()
    page.locator('[data-do="reset"]').click()
    assert charts(page) == states[0]


@pytest.mark.parametrize(
    ("act", "changes"),
    [
        (slide("gamma", 2), "norm-layer norm-rms norm-add"),
        (slide("beta", 1), "norm-layer norm-add"),
        (slide("f", 2), "norm-add sublayer"),
        (slide("bias", 4), "biased"),
        (slide("batch", 5), "shapes"),
        (slide("h1", -2), "attention jacobian backward greedy biased"),
        (slide("low", -130), "whylogits"),
        (choose("jacobian", "rain"), "jacobian"),
        (press('#loss [data-do="step"]'), "backward weight-1 weight-2 weight-3"),
        (press('[data-do="step-weight"]'), "backward weight-1 weight-2 weight-3"),
    ],
)
def test_more_controls(page: Page, act: Act, changes: str) -> None:
    def texts() -> dict[str, str]:
        found: dict[str, str] = page.evaluate(
            "names => Object.fromEntries(names.map(n => [n,"
            " document.querySelector(`[data-chart='${n}']`).textContent]))",
            MORE,
        )
        return found

    page.goto("/learn")
    before, address = texts(), page.url
    act(page)
    page.wait_for_function("old => location.href !== old", arg=address)
    after = texts()
    assert set(changes.split()) <= {name for name in MORE if after[name] != before[name]}


def test_the_scale_of_initial_logits_does_not_depend_on_the_width(page: Page) -> None:
    spread = {}
    for width in (16, 1024):
        page.goto(f"/learn?width={width}")
        lines = page.locator('[data-chart="initial"] tbody tr').evaluate_all(
            "rows => rows.map(row => [row.dataset.line, Number(row.dataset.value)])"
        )
        spread[width] = dict(lines)
        assert spread[width]["bound"] == pytest.approx(width**-0.5)
        assert spread[width]["weight"] == pytest.approx((3 * width) ** -0.5, rel=0.02)
        assert spread[width]["logit"] == pytest.approx(3**-0.5, rel=0.1)
    assert spread[1024]["unscaled"] > 5 * spread[16]["unscaled"]


def test_what_the_tries_say_is_true(page: Page) -> None:
    """A bias of 6 makes "taxes" win, 4 does not; the target's row of W moves towards h."""
    winners = []
    for bias in (4, 6):
        page.goto(f"/learn?bias={bias}")
        rows = page.locator('[data-chart="biased"] tbody tr')
        scores = [
            float(row.locator("td.figure").nth(1).inner_text().replace("−", "-"))
            for row in rows.all()
        ]
        winners.append(rows.nth(int(np.argmax(scores))).locator("th").inner_text())
    assert winners == ["you", "taxes"]
    page.goto("/learn?steps=1&target=1")
    hidden, moved = [2.0, 1.0, -1.0], []
    for column in (1, 2, 3):
        rows = page.locator(f'[data-chart="weight-{column}"] tbody tr')
        now = float(rows.nth(1).locator("td.figure").inner_text().replace("−", "-"))
        moved.append(now - [0.5, 1.4, -0.1][column - 1])
        expect(rows.nth(1).locator(".mark")).to_have_count(1)
    assert np.dot(moved, hidden) > 0


def test_numbers_on_the_page_agree_with_each_other(page: Page) -> None:
    """Shapes multiply, the product along a path is the one shown, and the axis starts at 0."""
    page.goto("/learn?batch=5&positions=7")
    expect(page.locator('[data-chart="shapes"]')).to_contain_text("(5, 7, 3) × Wᵀ (3, 6) → ")
    expect(page.locator('[data-chart="shapes"]')).to_contain_text("logits (5, 7, 6)")
    for leaf in range(6):
        page.goto(f"/learn?leaf={leaf}")
        shown = page.locator('[data-chart="product"]').inner_text()
        *factors, product = (float(x) for x in re.findall(r"\d\.\d+", shown))
        assert np.prod(factors) == pytest.approx(product, abs=len(factors) * 5e-5)
    curve = page.locator("#temperature .curve")
    expect(curve.locator("figcaption")).to_contain_text("nats")
    ticks = curve.locator("svg > text.label").all_text_contents()
    assert ticks[:6] == ["0", "1", "2", "3", "4", "5"]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_row_of_the_linear_layer_is_one_line_on_a_phone(page: Page, lang: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"/learn?lang={lang}")
    rows = page.locator('[data-chart="dots"] tbody tr')
    heights = rows.evaluate_all("all => all.map(row => row.getBoundingClientRect().height)")
    assert len(heights) == 6
    assert max(heights) < 40


def test_formulas_say_what_the_code_computes(page: Page) -> None:
    page.goto("/learn")
    formulas = page.locator("#norms math").evaluate_all("all => all.map(math => math.textContent)")
    assert "γhmean(h2)+ε" in formulas  # the mean of h², not of h
    # Text beside elements is not rendered in MathML.
    loose = page.locator("math").evaluate_all(
        "all => all.flatMap(math => [...math.querySelectorAll('mrow, msup, msub, mfrac, msqrt')]"
        ".filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))"
        ".map(e => e.outerHTML))"
    )
    assert loose == []


def test_the_jacobian_is_what_is_measured_and_the_other_formula_is_not(page: Page) -> None:
    page.goto("/learn?changed=1")
    rows = page.locator('[data-chart="jacobian"] tbody tr')
    cells = [row.locator("td.figure").all_inner_texts() for row in rows.all()]
    assert all(formula == measured for formula, measured, _ in cells)
    assert any(formula != wrong for formula, _, wrong in cells)


def test_the_naive_loss_is_infinite_where_the_other_is_exact(page: Page) -> None:
    page.goto("/learn?low=-130")
    expect(page.locator('[data-chart="whylogits"] .bad')).to_contain_text("inf")
    expect(page.locator('[data-chart="whylogits"] td').nth(1)).to_contain_text("133.")


def test_a_logit_beyond_what_fits_is_shown_as_broken(page: Page) -> None:
    page.goto("/learn")
    bad = page.locator('[data-chart="stable"] .bad')
    slide("big", 88.7)(page)
    expect(bad).to_have_count(0)
    slide("big", 88.8)(page)
    expect(bad.filter(has_text="inf")).to_have_count(2)
    expect(bad.filter(has_text="nan")).to_have_count(2)
    slide("big", 12)(page)
    expect(bad).to_have_count(0)
    choose("stable", "float16")(page)
    expect(bad).not_to_have_count(0)


def order(page: Page) -> list[str]:
    found: list[str] = page.locator("li.card").evaluate_all(
        "cards => cards.map(card => card.dataset.stage)"
    )
    return found


def test_cards_move_by_keyboard_and_by_mouse(page: Page) -> None:
    page.goto("/learn")
    assert order(page)[:3] == ["temperature", "top_k", "top_p"]
    ours, theirs = charts(page)["orders"].split("llama.cpp")
    assert "dogs" not in ours
    assert "dogs" in theirs
    page.get_by_role("button", name="Move temperature down").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert order(page)[:3] == ["top_k", "top_p", "temperature"]
    expect(page.locator('[data-chart="left"] tr:not(.dead) th[scope=row]')).to_have_count(3)
    hf = page.get_by_role("button", name="Hugging Face order")
    expect(hf).to_have_attribute("aria-pressed", "false")
    page.locator('[data-stage="typical_p"] .grip').drag_to(page.locator('[data-stage="top_k"]'))
    assert order(page)[0] == "typical_p"
    hf.click()
    expect(hf).to_have_attribute("aria-pressed", "true")
    page.locator('[data-order="example"]').click()
    assert order(page)[:3] == ["temperature", "top_k", "top_p"]


def test_the_keyboard_alone_reaches_and_moves_controls(page: Page) -> None:
    page.goto("/learn")
    reached: set[str] = set()
    for _ in range(170):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "() => { const at = document.activeElement;"
            " return at.dataset.do || at.name || at.getAttribute('aria-label') || at.className }"
        )
        reached.add(str(name).split("-P")[0])
    wanted = "h1 h3 stretch norm c big t top_p use-min_p seed eps rate step x1 shift reset skip"
    assert set(wanted.split()) <= reached
    page.locator('input[name="h1"]').focus()
    page.keyboard.press("ArrowRight")
    rest(page, "h=2.1")
    page.locator("#loss input[value='1']").focus()
    page.keyboard.press("ArrowRight")
    rest(page, "target=2")


def test_formulas_have_a_font_of_the_page(page: Page) -> None:
    page.goto("/learn")
    page.wait_for_function(
        "() => [...document.fonts].some(f => f.family.includes('STIX') && f.status === 'loaded')"
    )
    assert "STIX Two Math" in page.locator("math").first.evaluate(
        "math => getComputedStyle(math).fontFamily"
    )


def test_language_and_colours(page: Page) -> None:
    page.goto("/learn")
    page.locator(".settings").get_by_label("中文").check()
    expect(page.locator("h1")).to_have_text("一个向量怎样变成一个词")
    assert page.locator("html").get_attribute("lang") == "zh-Hans"
    assert page.title() == "学习 · lmhead"
    light = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.locator(".settings").get_by_label("深色").check()
    rest(page, "theme=dark")
    assert page.evaluate("() => getComputedStyle(document.body).backgroundColor") != light


@pytest.mark.parametrize(
    "query",
    [
        "h=1,2&t=0&chain=top_k:2&seed=-1&lang=fr&x=1,2,3,4",
        "h=9,9,9&t=NaN&chain=top_k:2.5,x&target=1e9&format=<script>",
        "h=a,b,c&t=&steps=1e99&big=%00&chain=",
    ],
)
def test_nonsense_in_the_address_is_the_default(page: Page, query: str) -> None:
    page.goto("/learn")
    before = charts(page)
    page.goto(f"/learn?{query}")
    assert charts(page) == before


EXTREME = "big=90&steps=9&draws=1000&x=-2,2,3&h=-3,-2.5,-3&stretch=10"


@pytest.mark.parametrize("look", ["lang=en&theme=light", "lang=zh&theme=dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut(page: Page, width: int, look: str) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"/learn?{look}&{EXTREME}")
    outside = page.evaluate(
        """() => {
          const wide = document.documentElement.clientWidth;
          const beyond = e => e.getBoundingClientRect().right > wide + 1;
          const scrolls = e => e.scrollWidth > e.clientWidth + 1;
          return [...[...document.querySelectorAll('main *:not(pre code), header *')]
                    .filter(e => !e.closest('nav') && beyond(e)),
                  ...[...document.querySelectorAll('.formula, table')].filter(scrolls)]
            .map(e => `${e.tagName} ${e.textContent.slice(0, 40)}`);
        }"""
    )
    assert outside == []
    text = page.locator("body").inner_text()
    assert "undefined" not in text
    assert "{" not in text
