"""The sampler bench: cards in any order, typed values, scales, the cut, draws, and copies."""

import ast
import json
import shlex
from collections import Counter
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from playwright.sync_api import Page, expect

import lmhead
from explorer.read_page import opened
from lmhead.analysis.token_text import hidden_states, prompt_ids
from lmhead.cli import main
from lmhead.models import LanguageModel
from lmhead.sampling import Temperature, TopK, TopP

Shown = list[dict[str, float]]


def order(page: Page) -> list[str]:
    found: list[str] = page.locator("li.card").evaluate_all("all => all.map(c => c.dataset.stage)")
    return found


def shown(page: Page) -> Shown:
    found: Shown = page.locator('[data-chart="ranked"] tbody tr').evaluate_all(
        "rows => rows.map(r => ({id: Number(r.dataset.id), p: Number(r.dataset.processed)}))"
    )
    return found


def left(model: LanguageModel, sampler: lmhead.Sampler, prompt: str) -> torch.Tensor:
    ids = prompt_ids(model, prompt)
    logits = torch.nn.functional.linear(hidden_states(model, ids)[-1:], model.head.weight).double()
    return sampler.process(logits, [ids], prompt_length=len(ids))[0].softmax(-1)


def expect_same(page: Page, want: torch.Tensor) -> None:
    for token in shown(page):
        assert token["p"] == pytest.approx(float(want[int(token["id"])]), abs=1e-6)


OPTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("dyn", "0.5", {"dynatemp_range": 0.5}),
    ("sigma", "1.5", {"top_n_sigma": 1.5}),
    ("toph", "0.4", {"top_h": 0.4}),
    ("epsilon", "0.02", {"epsilon_cutoff": 0.02}),
    ("eta", "0.05", {"eta_cutoff": 0.05}),
    ("xtc", "1", {"xtc_probability": 1.0}),
    ("miro", "2", {"mirostat": 2}),
    ("dry", "0.8", {"dry_multiplier": 0.8}),
]


# Of `llama-cli --help`.
LLAMA_FLAGS = {
    f"--{name}"
    for name in [
        "samplers",
        "seed",
        "temp",
        "top-k",
        "top-p",
        "min-p",
        "top-nsigma",
        "typical",
        "xtc-probability",
        "xtc-threshold",
        "repeat-last-n",
        "repeat-penalty",
        "presence-penalty",
        "frequency-penalty",
        "dry-multiplier",
        "dry-base",
        "dry-allowed-length",
        "dry-sequence-breaker",
        "dynatemp-range",
        "dynatemp-exp",
    ]
}


@pytest.mark.parametrize(("name", "value", "options"), OPTIONS)
def test_every_stage_is_the_library_s(
    here: Page,
    address: str,
    models: dict[str, LanguageModel],
    name: str,
    value: str,
    options: dict[str, Any],
) -> None:
    prompt = "hello hello hello"
    opened(here, f"{address}/next?prompt={prompt}&top=300&{name}={value}")
    expect_same(here, left(models["tiny"], lmhead.Sampler(seed=0, **options), prompt))


def test_cards_move_by_mouse_and_keyboard_and_their_order_counts(
    here: Page, address: str, models: dict[str, LanguageModel]
) -> None:
    opened(here, f"{address}/next?prompt=hello&top=300&t=0.5&p=0.7&k=9")
    first = shown(here)
    top_p = here.locator('[data-stage="top_p"] .grip')
    top_p.drag_to(here.locator('[data-stage="temperature"]'))
    assert order(here).index("top_p") == order(here).index("temperature") - 1
    assert shown(here) != first
    down = here.get_by_role("button", name="Move Temperature down")
    for _ in range(4):
        down.focus()
        here.keyboard.press("Enter")
    names = [name for name in order(here) if name in ("temperature", "top_p", "top_k")]
    assert names == ["top_p", "top_k", "temperature"]
    stages = [TopP(0.7), TopK(9), Temperature(0.5)]
    expect_same(here, left(models["tiny"], lmhead.Sampler(stages=stages, seed=0), "hello"))
    here.wait_for_function("() => decodeURIComponent(location.search).includes('top_p,')")
    here.reload()
    here.wait_for_selector('[data-chart="ranked"]')
    assert [n for n in order(here) if n in names] == names
    here.get_by_label("llama.cpp", exact=True).check()
    assert order(here)[-2:] == ["temperature", "mirostat"]


def test_a_typed_value_acts_and_a_wrong_one_is_reported(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello")
    exact = here.locator('input[name="p-exact"]')
    exact.fill("0.123")
    here.wait_for_function("() => location.search.includes('p=0.123')")
    card = here.locator('[data-stage="top_p"]')
    expect(card.locator(".outcome")).to_contain_text("removes")
    exact.fill("7")
    expect(here.get_by_role("alert")).to_have_text("A number from 0 to 1.")
    exact.blur()
    expect(exact).to_have_value("0.123")
    card.get_by_role("switch").click()
    expect(card.locator(".outcome")).to_have_text("")


def test_mirostat_with_a_filter_is_refused_as_in_the_library(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&miro=2&k=5")
    expect(here.get_by_role("alert")).to_contain_text("switch off Top-k")
    with pytest.raises(ValueError, match="top_k"):
        lmhead.Sampler(mirostat=2, top_k=5)


def test_bars_have_one_scale_from_0_to_1_or_a_log_scale(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello")
    row = here.locator('[data-chart="ranked"] tbody tr').first
    bar = row.locator(".fill")
    p = float(row.get_attribute("data-processed") or "nan")

    def width() -> float:
        value: str = bar.evaluate("e => e.style.width")
        return float(value.rstrip("%")) / 100

    assert width() == pytest.approx(p, abs=1e-4)
    here.get_by_label("log, 10⁻⁶ to 1").check()
    assert width() == pytest.approx(1 + torch.tensor(p).log10().item() / 6, abs=1e-4)


def test_the_cut_is_on_the_curve_with_the_value_under_the_pointer(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&k=7")
    curve = here.locator('[data-chart="curve"]')
    expect(curve.locator("[data-cut]")).to_have_attribute("data-cut", "7")
    expect(curve.locator("[data-cut]")).to_contain_text("tokens left: 7")
    key = curve.locator("figcaption")
    expect(key).to_contain_text("p after the sampler")
    expect(key).to_contain_text("p of the model")
    stroke = "path => getComputedStyle(path).stroke"
    lines = [line.evaluate(stroke) for line in curve.locator("path.line").all()]
    fill = here.locator('[data-chart="ranked"] .fill').first
    bar = fill.evaluate("bar => getComputedStyle(bar).backgroundColor")
    # As in the bars: the sampler's probabilities are blue, the model's orange.
    assert len(lines) == 2
    assert lines[0] != bar
    assert lines[1] == bar
    curve.scroll_into_view_if_needed()
    box = curve.locator("svg").bounding_box()
    assert box is not None
    here.mouse.move(box["x"] + box["width"] * 48 / 440 + 1, box["y"] + 60)
    expect(curve.locator(".pointed")).to_contain_text("rank 1:")


def test_a_thousand_draws_are_the_library_s(
    here: Page, address: str, models: dict[str, LanguageModel]
) -> None:
    opened(here, f"{address}/next?prompt=hello&k=5&seed=11")
    here.locator('[data-do="draws"]').click()
    rows = here.locator('[data-chart="draws"] tbody tr')
    here.wait_for_function(
        "() => [...document.querySelectorAll('[data-chart=draws] tbody tr')]"
        ".reduce((sum, row) => sum + Number(row.dataset.count), 0) === 1000"
    )
    model = models["tiny"]
    ids = prompt_ids(model, "hello")
    logits = torch.nn.functional.linear(hidden_states(model, ids)[-1:], model.head.weight).double()
    sampler = lmhead.Sampler(top_k=5, seed=11)
    positions = len(ids) + torch.arange(1000)
    tokens = sampler(logits.expand(1000, -1), position=positions).token
    want = dict(Counter(tokens.tolist()))
    found = rows.evaluate_all("all => all.map(r => [r.dataset.id, r.dataset.count].map(Number))")
    assert dict(map(tuple, found)) == want


def test_the_sampler_is_copied_for_other_programs(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&t=0.7&p=0.9&xtc=0.5")
    here.locator('[data-chart="copy"] summary').click()

    def code(program: str) -> str:
        return here.locator(f'[data-program="{program}"] code').inner_text()

    scope: dict[str, Any] = {}
    exec(code("huggingface"), scope)  # transformers accepts every parameter
    config = scope["config"]
    config.validate()
    assert (config.do_sample, config.top_k, config.temperature, config.top_p) == (True, 0, 0.7, 0.9)
    expect(here.locator('[data-program="huggingface"] .alarm')).to_contain_text("XTC")
    assert "--temp 0.7" in code("llama.cpp")
    assert "--xtc-probability 0.5" in code("llama.cpp")
    assert code("vllm").endswith("params = SamplingParams(temperature=0.7, top_p=0.9, seed=0)")
    exec(code("python"), scope)
    assert [stage.name for stage in scope["sampler"].stages] == [
        "temperature",
        "top_p",
        "xtc_probability",
    ]
    command = code("command")
    assert command.startswith("lmhead generate tiny ")
    assert "--xtc-probability 0.5" in command
    assert command.endswith(" hello")
    ran = CliRunner().invoke(main, [*shlex.split(command)[1:], "-n", "3"])  # the bundled model
    assert ran.exit_code == 0, ran.output
    assert ran.output.strip()


def test_copies_of_all_stages_have_parameters_that_the_programs_know(
    here: Page, address: str
) -> None:
    query = "t=0.7&k=40&p=0.9&m=0.05&toph=0.4&typ=0.9&epsilon=0.0009&eta=0.002&rep=1.2&freq=0.5"
    opened(here, f"{address}/next?prompt=hello&{query}&pres=0.5&sigma=1&xtc=0.5&dry=0.8&dyn=0.3")
    here.locator('[data-chart="copy"] summary').click()
    copies = {
        program: here.locator(f'[data-program="{program}"] code').inner_text()
        for program in ("huggingface", "vllm", "llama.cpp")
    }
    scope: dict[str, Any] = {}
    exec(copies["huggingface"], scope)
    config = scope["config"]
    config.validate()
    known = "top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty"
    want = [40, 0.9, 0.05, 0.4, 0.9, 0.0009, 0.002, 1.2]
    assert [getattr(config, name) for name in known.split()] == want
    call = ast.parse(copies["vllm"].splitlines()[-1]).body[0]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    fields = "temperature top_k top_p min_p repetition_penalty frequency_penalty presence_penalty"
    assert [option.arg for option in call.value.keywords] == [*fields.split(), "seed"]
    words = shlex.split(copies["llama.cpp"])
    flags, values = words[::2], words[1::2]
    assert set(flags) <= LLAMA_FLAGS
    assert len(flags) == len(values) == len(set(flags))
    named = values[flags.index("--samplers")].split(";")
    expected = "penalties dry temperature top_n_sigma top_k top_p min_p typ_p xtc"
    assert named == expected.split()


def test_an_order_of_one_s_own_goes_to_the_server(here: Page, address: str) -> None:
    own = "mirostat,top_p,temperature"
    rest = (
        "repetition_penalty,frequency_penalty,dry_multiplier,top_n_sigma,top_h,top_k,min_p,"
        "typical_p,epsilon_cutoff,eta_cutoff,xtc_probability"
    )
    opened(here, f"{address}/next?prompt=hello&t=0.5&p=0.7&order={own},{rest}")
    with here.expect_request("**/api/paths") as sent:
        here.locator('[data-do="paths"]').click()
    body = json.loads(sent.value.post_data or "{}")
    assert body["sampler"] == {
        "temperature": 0.5,
        "top_p": 0.7,
        "stages": ["top_p", "temperature"],
        "seed": 0,
    }
    expect(here.locator("[data-path]")).to_have_count(3)
