"""The page of training: figures of the package, and a run that is watched while it grows."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from server.serve_tiny import running

from explorer.read_page import api_requests
from explorer.test_python import assert_same
from explorer.test_python import run as run_python
from lmhead.explorer import page_folder
from lmhead.sweep.questions import make_plan
from lmhead.train.train_config import TrainConfig

Act = Callable[[Page], None]
HOSTILE = "<img src=x onerror=alert(1)>\u202e\u001b[31m {n}"
STEPS = 400


def write_lines(run: Path, steps: range, *, mode: str = "a", sample: str = "") -> None:
    """What a run writes: a line every ten steps, a validation and a text every hundred."""
    with (run / "log.jsonl").open(mode, encoding="utf-8") as file:
        for step in steps:
            loss = 4 - step / 200
            line: dict[str, Any] = {"step": step, "loss": loss, "rate": 1e-3, "norm": 1.0}
            line |= {"tokens_per_second": 1000.0 + step, "seconds": step * 0.5}
            file.write(json.dumps(line) + "\n")
            if step % 100 == 0:
                text = sample or f"Written at {step}."
                file.write(json.dumps({"step": step, "sample": text}) + "\n")
                file.write(json.dumps({"step": step, "valid": {"loss": loss + 0.1}}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder in which nothing has begun."""
    folder = tmp_path / "my run"
    folder.mkdir()
    return folder


@pytest.fixture
def here(page: Page, run: Path) -> Iterator[str]:
    """The address of a server that watches the run."""
    with running(page_folder(), models={}, run=run) as port:
        address = f"http://127.0.0.1:{port}"
        yield f"{address}/train"
        page.goto("about:blank")


def begin(run: Path, last: int = 200, **options: Any) -> None:
    (run / "config.toml").write_text(TrainConfig(steps=STEPS).to_toml())
    write_lines(run, range(10, last + 1, 10), **options)


def opened(page: Page, query: str = "") -> None:
    page.goto(f"/train?{query}")
    page.wait_for_selector('[data-chart="how"]')


def figures(page: Page) -> dict[str, int]:
    """Bytes by tensor."""
    found: dict[str, int] = page.locator("[data-tensor]").evaluate_all(
        "rows => Object.fromEntries(rows.map(r => [r.dataset.tensor, Number(r.dataset.bytes)]))"
    )
    return found


def charts(page: Page) -> dict[str, str]:
    found: dict[str, str] = page.evaluate(
        "() => Object.fromEntries([...document.querySelectorAll('[data-chart]')]"
        ".map(chart => [chart.dataset.chart, chart.textContent]))"
    )
    return found


def fact(page: Page, chart: str, name: str) -> Any:
    return page.locator(f'[data-chart="{chart}"] [data-fact="{name}"] dd')


# Memory


@pytest.mark.parametrize(
    ("query", "sizes", "most"),
    [
        ("", (8192, 49152, 576), None),
        ("v=128256&d=4096&n=16384&dtype=bfloat16&max=32", (16384, 128256, 4096), 2**25),
        ("v=262144&d=1152&n=1000&dtype=bfloat16&loss=upcast", (1000, 262144, 1152), None),
        ("v=64&d=16&n=16", (16, 64, 16), None),
    ],
)
def test_the_figures_are_the_package_s(
    page: Page, query: str, sizes: tuple[int, int, int], most: int | None
) -> None:
    opened(page, query)
    tokens, vocab, width = sizes
    half = "bfloat16" in query
    plan = make_plan(*sizes, itemsize=4, converts=half, retain=True, max_bytes=most)
    shown = figures(page)
    assert shown["tiles"] == plan.bytes
    assert shown.get("sums", 0) == (4 * (vocab + tokens) * width if half else 0)
    item = 2 if half and "upcast" not in query else 4
    names = ("log_softmax", "grad_log_softmax", "grad_logits")
    assert {shown[name] for name in names} == {tokens * vocab * item}
    blocks = page.locator("figure.python code").evaluate_all(
        "blocks => blocks.filter(b => b.dataset.values).map(b => [b.textContent, b.dataset.values])"
    )
    ((code, values),) = blocks
    for got, want in zip(run_python(code, {}), json.loads(values), strict=True):
        assert_same(got, want, code)


def test_the_step_on_the_page_runs(page: Page) -> None:
    opened(page, "v=500&d=16&n=40&dtype=bfloat16&max=32")
    code = page.locator("figure.python code").filter(has_text="backward").inner_text()
    scope: dict[str, Any] = {}
    run_python(code, scope)
    assert scope["weight"].grad.shape == (500, 16)
    assert scope["loss"].item() > 0


def slide(name: str, presses: int) -> Act:
    def act(page: Page) -> None:
        page.locator(f'input[type=range][name="{name}"]').focus()
        for _ in range(presses):
            page.keyboard.press("ArrowRight")

    return act


def choose(text: str) -> Act:
    return lambda page: page.get_by_label(text, exact=True).check()


CONTROLS: list[tuple[Act, str]] = [
    (lambda page: page.get_by_role("button", name="Llama 3 8B").click(), "v=128256&d=4096"),
    (slide("n", 8), "n=16384"),
    (slide("v", 1), "v=147456"),
    (slide("d", 3), "d=5632"),
    (choose("bfloat16"), "dtype=bfloat16"),
    (choose("cross_entropy(z.float(), y)"), "loss=upcast"),
    (choose("512 MiB"), "max=512"),
    (lambda page: page.locator('input[name="n-exact"]').fill("777"), "n=777"),
]


def test_every_control_changes_the_figures_and_can_be_taken_back(page: Page) -> None:
    opened(page)
    states, exact = [charts(page)], figures(page)
    for act, part in CONTROLS:
        was, address = exact, page.url
        act(page)
        page.wait_for_function(
            "([part, old]) => location.search.includes(part) && location.href !== old",
            arg=[part, address],
        )
        states.append(charts(page))
        exact = figures(page)
        assert exact != was, part
    page.reload()
    page.wait_for_selector('[data-chart="how"]')
    assert charts(page) == states[-1]
    for earlier in reversed(states[:-1]):
        address = page.url
        page.go_back()
        page.wait_for_function("old => location.href !== old", arg=address)
        assert charts(page) == earlier


def test_nonsense_in_the_address_is_the_default(page: Page) -> None:
    opened(page)
    before = charts(page)
    opened(page, "v=-1&d=x&n=1e99&dtype=int8&loss=<b>&max=7&at=-5&scale=cube")
    assert charts(page) == before


def test_where_few_tokens_need_no_tiles_the_page_says_so(page: Page) -> None:
    opened(page, "v=128256&d=4096&n=64&dtype=bfloat16")
    expect(page.locator('[data-chart="headline"]')).to_contain_text("times as much")
    opened(page, "v=128256&d=4096&n=8192")
    expect(page.locator('[data-chart="headline"]')).to_contain_text("times less")


# Runs


def test_without_a_run_there_is_a_command_to_start_one(page: Page) -> None:
    opened(page)
    code = page.locator('[data-chart="how"] code').inner_text()
    assert code.splitlines() == [
        "lmhead train book.txt --out run --preset cpu-small",
        "lmhead explore --run run",
    ]


def test_a_run_grows_while_it_is_watched(page: Page, here: str, run: Path) -> None:
    page.goto(here)
    expect(page.locator('[data-chart="how"]')).to_contain_text("--out 'my run' --preset")
    begin(run)
    page.wait_for_selector(
        '[data-chart="loss"]', timeout=15_000
    )  # the page requests news every five seconds
    expect(page.locator('[data-chart="standing"]')).to_have_attribute("data-state", "training")
    assert "watch" in (page.locator("section.step").first.get_attribute("class") or "")
    assert fact(page, "standing", "step").inner_text() == "200 of 400"
    assert fact(page, "standing", "left").inner_text() == "1:40"
    assert fact(page, "here", "train").inner_text() == "3.0000"
    assert fact(page, "here", "valid").inner_text() == "3.1000"
    assert fact(page, "here", "speed").inner_text() == "1,200"
    expect(page.locator('[data-chart="loss"] .series.dots circle')).to_have_count(2)
    expect(page.locator('[data-chart="sample"] blockquote')).to_have_text("Written at 200.")
    requests = api_requests(page)
    write_lines(run, range(210, 311, 10))
    expect(fact(page, "standing", "step")).to_have_text("310 of 400")
    assert requests
    assert all(re.search(r"/api/run\?after=[1-9]\d*&mark=\w+$", url) for url in requests)
    expect(page.locator('[data-chart="sample"] blockquote')).to_have_text("Written at 300.")
    write_lines(run, range(320, STEPS + 1, 10))
    expect(page.locator('[data-chart="standing"]')).to_have_attribute("data-state", "done")
    assert fact(page, "standing", "best").inner_text() == "2.1000 at step 400"
    expect(page.locator('[data-chart="loss"] table tbody tr')).to_have_count(4)


def test_a_run_that_was_taken_back_is_drawn_anew(page: Page, here: str, run: Path) -> None:
    begin(run)
    page.goto(here)
    expect(fact(page, "standing", "step")).to_have_text("200 of 400")
    write_lines(run, range(10, 101, 10), mode="w")
    expect(fact(page, "standing", "step")).to_have_text("100 of 400")
    expect(page.locator('[data-chart="loss"] .series.dots circle')).to_have_count(1)


def test_a_step_is_looked_at_by_keyboard_and_kept_in_the_address(
    page: Page, here: str, run: Path
) -> None:
    begin(run, sample=HOSTILE)
    page.goto(here)
    page.wait_for_selector('[data-chart="here"]')
    look = page.locator('input[name="at"]')
    look.focus()
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function("() => location.search.includes('at=140')")
    assert fact(page, "here", "train").inner_text() == "3.3000"
    assert fact(page, "here", "valid").inner_text() == "3.6000"  # of step 100, the last before
    page.get_by_label("logarithmic").check()
    page.wait_for_function("() => location.search.includes('scale=log')")
    page.reload()
    page.wait_for_selector('[data-chart="here"]')
    assert page.locator('[data-chart="here"]').get_attribute("data-step") == "140"
    assert page.get_by_label("logarithmic").is_checked()
    page.go_back()
    expect(page.get_by_label("linear")).to_be_checked()
    look.focus()
    page.keyboard.press("End")
    page.wait_for_function("() => !location.search.includes('at=')")
    # Sample text is shown as text.
    shown = page.locator('[data-chart="sample"] blockquote').inner_text()
    assert shown == "<img src=x onerror=alert(1)>\ufffd\ufffd[31m {n}"
    assert page.locator("main img").count() == 0


@pytest.mark.parametrize("look", ["lang=en&theme=light", "lang=zh&theme=dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut(page: Page, here: str, run: Path, width: int, look: str) -> None:
    begin(run, sample="x" * 300)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{here}?{look}&v=1048576&d=16384&n=1048576&dtype=bfloat16&loss=upcast")
    page.wait_for_selector('[data-chart="sample"]')
    for summary in page.locator("main summary").all():
        summary.click()
    outside = page.evaluate(
        """() => {
          const wide = document.documentElement.clientWidth;
          const beyond = e => e.getBoundingClientRect().right > wide + 1;
          const scrolls = e => e.scrollWidth > e.clientWidth + 1;
          return [...[...document.querySelectorAll('main *:not(pre code), header *')]
                    .filter(e => !e.closest('nav') && beyond(e)),
                  ...[...document.querySelectorAll('table, blockquote')].filter(scrolls)]
            .map(e => `${e.tagName} ${e.textContent.slice(0, 40)}`);
        }"""
    )
    assert outside == []
    text = page.locator("main").inner_text()
    assert "undefined" not in text
    assert "NaN" not in text
    assert ("内存" in text) == ("lang=zh" in look)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_size_out_of_range_is_reported(page: Page, here: str, lang: str) -> None:
    page.goto(f"{here}?v=1000&lang={lang}")
    field = page.locator('input[name="v-exact"]')
    field.fill("-5")
    expect(field).to_have_attribute("aria-invalid", "true")
    about = {"en": "An integer from 64 to", "zh": "请填 64 到"}[lang]
    expect(page.get_by_role("alert")).to_contain_text(about)
    field.blur()
    expect(field).to_have_value("1000")
    expect(page.get_by_role("alert")).to_have_count(0)
