"""The page of the next token: its numbers are the library's, and tokens are shown as text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from playwright.sync_api import Page, expect

from explorer.read_page import (
    api_requests,
    column,
    numbers,
    opened,
    outside,
    pieces,
    refusal,
    settled,
)
from lmhead import Sampler
from lmhead.analysis import next_tokens
from lmhead.cli import main
from lmhead.models import LanguageModel

Watched = tuple[Page, list[str]]
PROMPT = "hello hello"


@pytest.mark.parametrize(
    ("query", "options"),
    [
        ("t=0.8&p=0.9", {"temperature": 0.8, "top_p": 0.9}),
        ("t=1.5&k=20&m=0.2", {"temperature": 1.5, "top_k": 20, "min_p": 0.2}),
        (
            "t=0.5&k=9&p=0.7&order=llama.cpp",
            {"temperature": 0.5, "top_k": 9, "top_p": 0.7, "order": "llama.cpp"},
        ),
        ("typ=0.3", {"typical_p": 0.3}),
        ("rep=1.5&t=0.9&p=0.95", {"repetition_penalty": 1.5, "temperature": 0.9, "top_p": 0.95}),
        (
            "rep=1.25&freq=0.5&pres=-0.3&t=2&k=150&typ=0.8&p=0.9&m=0.01&order=llama.cpp",
            {"repetition_penalty": 1.25, "frequency_penalty": 0.5, "presence_penalty": -0.3}
            | {"temperature": 2.0, "top_k": 150, "typical_p": 0.8, "top_p": 0.9, "min_p": 0.01}
            | {"order": "llama.cpp"},
        ),
    ],
)
def test_the_numbers_are_those_of_lmhead_next(
    here: Page, address: str, folder: Path, query: str, options: dict[str, Any]
) -> None:
    opened(here, f"{address}/next?prompt=hello+hello&top=30&seed=5&{query}")
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = ["next", str(folder / "tiny.bin"), PROMPT, "--json", "--top=30", "--seed=5", *given]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    want = json.loads(result.stdout)
    tokens, processed = want["tokens"], want["processed"]
    assert numbers(here, "id") == [token["id"] for token in tokens]
    assert numbers(here, "p") == pytest.approx([token["p"] for token in tokens], abs=1e-6)
    left = [token["processed_p"] for token in tokens]
    assert numbers(here, "processed") == pytest.approx(left, abs=1e-6)
    assert column(here, "ranked", "cut") == [token["cut_by"] or "" for token in tokens]
    steps = processed["steps"]
    assert numbers(here, "kept", "stages") == [step["kept"] for step in steps]
    assert numbers(here, "best", "stages") == [step["best"] for step in steps]
    for field, name in (("mass", "mass"), ("entropy", "entropy"), ("p", "best_prob")):
        shown = numbers(here, field, "stages")
        assert shown == pytest.approx([step[name] for step in steps], abs=1e-6)
    entropy = here.locator('[data-chart="entropy"]').inner_text()
    assert f"{want['entropy']:.4f}" in entropy
    assert f"{processed['entropy']:.4f}" in entropy
    assert f"{100 * want['mass']:.2f}" in here.locator(".play.rest").inner_text()
    drawn_id = here.locator('[data-chart="choices"] dd').last.get_attribute("data-id")
    assert drawn_id == str(processed["token"]["id"])


def test_penalties_count_generated_tokens(
    here: Page, address: str, models: dict[str, LanguageModel]
) -> None:
    model = models["tiny"]
    assert model.tokenizer is not None
    prompt, more = model.tokenizer.encode(PROMPT), [264, 270, 270]
    query = "freq=1.5&pres=0.5&top=300&seed=3&more=264,270,270"
    opened(here, f"{address}/next?prompt=hello+hello&{query}")
    ids = torch.tensor([[*prompt, *more]])
    logits = (model.hidden(ids)[0][:, -1] @ model.head.weight.T).detach().double()
    sampler = Sampler(frequency_penalty=1.5, presence_penalty=0.5, seed=3)
    p = sampler.process(logits, ids, prompt_length=len(prompt))[0].softmax(-1)
    shown = dict(zip(numbers(here, "id"), numbers(here, "processed"), strict=True))
    assert [shown[id] for id in range(300)] == pytest.approx(p.tolist(), abs=1e-6)
    drawn = int(sampler(logits, ids, prompt_length=len(prompt)).token)
    drawn_id = here.locator('[data-chart="choices"] dd').last.get_attribute("data-id")
    assert drawn_id == str(drawn)


def test_every_slider_acts_at_once_without_the_model(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&more=264&top=300")
    requests = api_requests(here)
    before = numbers(here, "processed")
    stages = here.locator('[data-chart="stages"] tbody tr')
    sliders = {"t": "0.3", "k": "7", "p": "0.4", "m": "0.5", "typ": "0.2"}
    sliders |= {"rep": "1.8", "freq": "1.2", "pres": "-0.7"}
    for name, value in sliders.items():
        slider = here.locator(f'input[name="{name}"]')
        neutral = slider.input_value()
        slider.fill(value)
        expect(stages).to_have_count(2)
        after = numbers(here, "processed")
        assert sorted(after) != sorted(before), name
        assert sum(after) == pytest.approx(1, abs=1e-9), name
        here.wait_for_function(f"() => location.search.includes('{name}={value}')")
        slider.fill(neutral)
        expect(stages).to_have_count(1)
        here.wait_for_function(f"() => !location.search.includes('{name}={value}')")
        assert numbers(here, "processed") == pytest.approx(before, abs=1e-12), name
    assert requests == []


def test_sliders_are_kept_by_a_reload_and_taken_back_one_by_one(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&more=264&top=300")
    stages = here.locator('[data-chart="stages"] tbody tr')
    sliders = {"t": "0.3", "k": "200", "p": "0.95", "m": "0.05", "typ": "0.9"}
    sliders |= {"rep": "1.8", "freq": "1.2", "pres": "-0.7"}
    rows = []
    for name, value in sliders.items():
        rows.append(stages.count())
        here.locator(f'input[name="{name}"]').fill(value)
        here.wait_for_function(f"() => location.search.includes('{name}={value}')")
        # The two penalties that subtract are one stage.
        expect(stages).to_have_count(rows[-1] + (name != "pres"))
    after = numbers(here, "processed")
    here.reload()
    settled(here)
    for name, value in sliders.items():
        assert here.locator(f'input[name="{name}"]').input_value() == value
    assert numbers(here, "processed") == pytest.approx(after, abs=1e-12)
    for name in reversed(sliders):
        here.go_back()
        here.wait_for_function(f"() => !new URLSearchParams(location.search).has('{name}')")
        expect(stages).to_have_count(rows.pop())


def test_the_sampler_s_own_best_tokens_come_too(
    here: Page, address: str, models: dict[str, LanguageModel]
) -> None:
    opened(here, f"{address}/next?prompt=hello+hello&typ=0.05&top=4")
    want = next_tokens(models["tiny"], PROMPT, top=4, sampler=Sampler(typical_p=0.05, seed=0))
    assert numbers(here, "id") == [token.piece.id for token in want.tokens]
    assert len(want.tokens) > 4
    dead = here.locator('[data-chart="ranked"] tr.dead')
    expect(dead.first).to_contain_text("Typical-p")


def test_a_new_text_forgets_the_tokens_after_the_old_one(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&more=264,265&branches=266.*")
    here.locator("#prompt").fill("ab ab")
    here.get_by_role("button", name="Predict").click()
    here.wait_for_function("() => location.search.includes('prompt=ab+ab')")
    assert "more" not in here.url
    assert "branches" not in here.url
    here.go_back()
    expect(pieces(here).last).to_have_text("l")
    assert "more=264,265" in here.url


def test_hostile_tokens_are_text(here: Page, address: str) -> None:
    query = "model=hostile&top=300&more=262,263,264,265&branches=*.262,263.264,265"
    opened(here, f"{address}/next?{query}&prompt=<img src=x onerror=alert(2)>")
    expect(here.locator('[data-chart="ranked"] tbody tr')).to_have_count(300)
    shown = here.locator('[data-chart="ranked"]').inner_text()
    assert "<img␣src=x␣onerror=alert(1)>" in shown
    assert "⟨202E⟩gnp" in shown
    branches = here.locator('[data-chart="branches"]').inner_text()
    assert "<script>alert(1)</script>" in branches
    assert "⟨202E⟩gnp{n}" in branches
    here.locator('[data-do="paths"]').click()
    expect(here.locator("[data-path]")).to_have_count(3)
    assert here.locator("main img, main script").count() == 0


@pytest.mark.parametrize(
    ("lang", "bar", "mark"),
    [("en", "p after the sampler", "p of the model"), ("zh", "采样器之后的 p", "模型的 p")],
)
def test_bar_and_mark_are_explained(
    here: Page, address: str, lang: str, bar: str, mark: str
) -> None:
    opened(here, f"{address}/next?prompt=hello&lang={lang}")
    expect(here.locator('[data-chart="ranked"] caption')).to_contain_text(f"▬ {bar}")
    expect(here.locator('[data-chart="ranked"] caption')).to_contain_text(f"┃ {mark}")


def test_the_search_is_in_the_address(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello")
    # Letter by letter without a pause, which under load would be an entry in the history.
    here.locator("#find").evaluate(
        """field => [..."hello"].forEach(letter => {
          field.value += letter;
          field.dispatchEvent(new InputEvent("input", { bubbles: true }));
        })"""
    )
    rows = here.locator('[data-chart="found"] tbody tr')
    expect(rows).not_to_have_count(0)
    here.wait_for_function("() => location.search.includes('find=hello')")
    count = rows.count()
    here.reload()
    expect(here.locator("#find")).to_have_value("hello")
    expect(rows).to_have_count(count)
    here.go_back()  # one step for the whole token
    expect(here.locator("#find")).to_have_value("")


@pytest.mark.parametrize("typed", ["-5", "1.5", "99999999999999999999", "-", ""])
def test_an_invalid_seed_is_reported(here: Page, address: str, typed: str) -> None:
    opened(here, f"{address}/next?prompt=hello&seed=7")
    field = here.locator('input[name="seed"]')
    field.focus()
    here.keyboard.press("Control+A")
    here.keyboard.press("Delete")
    here.keyboard.insert_text(typed)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description("An integer from 0 to 9,007,199,254,740,991.")
    assert "seed=7" in here.url
    here.keyboard.press("Tab")
    expect(field).to_have_value("7")
    expect(field).to_have_attribute("aria-invalid", "false")
    expect(here.get_by_role("alert")).to_have_count(0)
    field.fill("12")
    here.wait_for_function("() => location.search.includes('seed=12')")
    here.keyboard.type("1.5")
    expect(field).to_have_value("121.5")
    expect(field).to_have_attribute("aria-invalid", "true")


def test_a_refusal_is_shown(here: Page, address: str, watched: Watched) -> None:
    with refusal(watched):
        here.goto(f"{address}/next?prompt={'hello ' * 300}")
        expect(here.locator(".alarm")).to_contain_text("from 1 to 64 tokens")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("look", ["lang=en&theme=light", "lang=zh&theme=dark"])
def test_nothing_is_cut(here: Page, address: str, width: int, look: str) -> None:
    here.set_viewport_size({"width": width, "height": 900})
    query = "rep=1.5&freq=0.5&t=2&k=150&typ=0.8&p=0.9&m=0.01&more=262,263&branches=*.262"
    opened(here, f"{address}/next?model=hostile&top=300&paths=1&{look}&{query}")
    here.locator("#find").fill("a")
    expect(here.locator("[data-path]")).to_have_count(3)
    here.evaluate("() => document.querySelectorAll('details').forEach(d => (d.open = true))")
    assert outside(here) == []
