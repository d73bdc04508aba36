"""Going on from a text: steps, branches, and what each way of choosing would say."""

import pytest
from playwright.sync_api import Page, expect

from explorer.read_page import api_requests, numbers, opened, pieces, settled
from lmhead import Sampler, beam_search, generate
from lmhead.models import LanguageModel


def names(page: Page) -> list[str]:
    found: list[str] = page.locator('[data-chart="branches"] .open bdi').all_inner_texts()
    return found


def test_tokens_can_be_taken_and_undone(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello")
    count = pieces(here).count()
    here.locator('[data-chart="ranked"] button.token-button').nth(2).click()
    expect(pieces(here)).to_have_count(count + 1)
    here.get_by_role("button", name="Undo").click()
    expect(pieces(here)).to_have_count(count)
    here.go_back()
    expect(pieces(here)).to_have_count(count + 1)


def test_steps_write_what_generate_writes(
    here: Page, address: str, models: dict[str, LanguageModel]
) -> None:
    opened(here, f"{address}/next?prompt=hello&t=0.9&p=0.95&seed=11")
    sampler = Sampler(temperature=0.9, top_p=0.95, seed=11)
    want = generate(models["tiny"], "hello", sampler, max_new_tokens=4).tokens
    start = pieces(here).count()
    for n in range(4):
        here.locator('[data-do="step"]').click()
        expect(pieces(here)).to_have_count(start + n + 1)
        settled(here)
    assert f"more={'%2C'.join(map(str, want))}&" in here.url + "&"


def test_branches_open_close_and_come_back(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&more=264,268")
    assert here.locator('[data-chart="branches"]').count() == 0
    count = pieces(here).count()
    here.get_by_role("button", name="Branch here").click()
    expect(here.locator('[data-chart="branches"] li')).to_have_count(2)
    here.locator('[data-chart="ranked"] button.token-button').first.click()
    expect(pieces(here)).to_have_count(count + 1)
    first, second = names(here)
    assert second.startswith(first)
    assert second != first
    longer = numbers(here, "p")
    # To the first one, and back to the second, which is where it was.
    here.get_by_role("button", name=f"Open the branch: 1 {first}", exact=True).click()
    expect(pieces(here)).to_have_count(count)
    expect(here.locator(".branches .here .open")).to_have_attribute("aria-current", "true")
    assert here.locator(".branches .here bdi").inner_text().startswith(first)
    shorter = numbers(here, "p")
    assert shorter != longer
    here.reload()
    settled(here)
    assert names(here) == [first, second]
    assert numbers(here, "p") == shorter
    here.get_by_role("button", name=f"Open the branch: 2 {second}", exact=True).click()
    expect(pieces(here)).to_have_count(count + 1)
    here.get_by_role("button", name=f"Close the branch: 1 {first}", exact=True).click()
    expect(here.locator('[data-chart="branches"]')).to_have_count(0)
    settled(here)
    assert numbers(here, "p") == longer
    here.go_back()
    expect(here.locator('[data-chart="branches"] li')).to_have_count(2)


def test_a_token_of_the_text_begins_a_branch_after_it(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&more=264,268,270")
    count = pieces(here).count()
    here.locator("button.piece").first.click()
    expect(pieces(here)).to_have_count(count - 2)
    assert "branches=264%2C268%2C270.*" in here.url
    assert "more=264&" in here.url + "&"


def test_three_ways_are_the_library_s_and_a_click_goes_on(
    here: Page, address: str, models: dict[str, LanguageModel]
) -> None:
    model = models["tiny"]
    opened(here, f"{address}/next?prompt=hello&t=1.2&k=40&seed=4&n=9&beams=3")
    assert here.locator("[data-path]").count() == 0
    here.get_by_role("button", name="Generate").click()
    expect(here.locator(".paths [aria-busy=false]")).to_have_count(1)
    sampler = Sampler(temperature=1.2, top_k=40, seed=4)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("hello")
    want = {
        "greedy": generate(model, ids, max_new_tokens=9).tokens,
        "sampler": generate(model, ids, sampler, max_new_tokens=9).tokens,
        "beam": beam_search(model, [ids], num_beams=3, max_new_tokens=9).best[0],
    }
    for name, tokens in want.items():
        way = here.locator(f'[data-path="{name}"]')
        assert way.get_attribute("data-ids") == ",".join(map(str, tokens))
        each = way.locator("tbody tr").evaluate_all(
            "rows => rows.map(r => Number(r.dataset.logProb))"
        )
        assert float(way.get_attribute("data-log-prob") or "nan") == pytest.approx(sum(each))
    greedy = generate(model, ids, max_new_tokens=9)
    total = here.locator('[data-path="greedy"]').get_attribute("data-log-prob")
    assert float(total or "nan") == pytest.approx(sum(greedy.log_probs), abs=1e-4)
    # A slider does not run the model; a note says that the result belongs to other settings.
    requests = api_requests(here)
    here.locator('input[name="t"]').fill("0.3")
    outdated = here.locator('[data-chart="outdated"]')
    expect(outdated).to_contain_text("settings have changed")
    assert requests == []
    here.get_by_role("button", name="Generate again").click()
    expect(outdated).to_have_text("")
    # A reload shows them again; a click on the third token of one continues up to there.
    here.reload()
    expect(here.locator(".paths [aria-busy=false]")).to_have_count(1)
    here.locator('[data-path="beam"] summary').click()
    here.locator('[data-path="beam"] button.token-button').nth(2).click()
    expect(pieces(here)).to_have_count(len(ids) + 3)
    assert f"more={'%2C'.join(map(str, want['beam'][:3]))}&" in here.url + "&"
    assert here.locator("[data-path]").count() == 0
    here.go_back()
    expect(here.locator("[data-path]")).to_have_count(3)


def test_by_keyboard_alone(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello")
    count = pieces(here).count()
    here.locator("#prompt").focus()
    for name in ("Predict", "Add the sampler’s token:", "Branch here"):
        here.keyboard.press("Tab")
        assert name in here.evaluate("() => document.activeElement.textContent")
        if name.startswith("Take"):
            here.keyboard.press("Enter")
            expect(pieces(here)).to_have_count(count + 1)
            settled(here)
            here.keyboard.press("Tab")
            here.keyboard.press("Space")  # undo
            expect(pieces(here)).to_have_count(count)
            settled(here)
    here.keyboard.press("Enter")
    expect(here.locator('[data-chart="branches"] li')).to_have_count(2)
    here.keyboard.press("Tab")
    here.keyboard.press("Tab")
    here.keyboard.press("Enter")  # closes the first one
    expect(here.locator('[data-chart="branches"]')).to_have_count(0)
    here.locator('input[name="typ"]').focus()
    here.keyboard.press("ArrowLeft")
    expect(here.locator('[data-chart="stages"] tbody tr')).to_have_count(2)
    here.locator('[data-do="paths"]').focus()
    here.keyboard.press("Enter")
    expect(here.locator("[data-path]")).to_have_count(3)


def test_the_focus_stays_where_the_keyboard_works(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello,+world!+How+are+you?&rep=0.5&top=4")
    count = pieces(here).count()
    tokens = here.locator('[data-chart="ranked"] button.token-button')
    expect(tokens).to_have_count(7)
    for rank, left in ((-1, 6), (2, None), (2, None)):  # the last row is gone with its token
        tokens.nth(rank).focus()
        here.keyboard.press("Enter")
        count += 1
        expect(pieces(here)).to_have_count(count)
        settled(here)
        assert left in (None, tokens.count())
        expect(tokens.nth(rank)).to_be_focused()
    step, undo = here.locator('[data-do="step"]'), here.locator('[data-do="undo"]')
    undo.focus()
    for _ in range(3):
        expect(undo).to_be_focused()
        here.keyboard.press("Enter")
        count -= 1
        expect(pieces(here)).to_have_count(count)
    expect(undo).to_be_disabled()
    expect(step).to_be_focused()


def test_the_focus_stays_among_the_branches(here: Page, address: str) -> None:
    opened(here, f"{address}/next?prompt=hello&more=264,268,270&branches=*.265")
    count = pieces(here).count()
    here.locator("button.piece").first.focus()
    here.keyboard.press("Enter")
    expect(pieces(here)).to_have_count(count - 2)
    expect(here.locator('[data-do="step"]')).to_be_focused()
    here.locator(".branches .close").last.focus()
    here.keyboard.press("Enter")
    expect(here.locator(".branches li")).to_have_count(2)
    expect(here.locator(".branches [aria-current]")).to_be_focused()
    here.keyboard.press("Tab")
    here.keyboard.press("Enter")
    expect(here.locator(".branches")).to_have_count(0)
    expect(here.locator('[data-do="branch"]')).to_be_focused()


@pytest.mark.parametrize(
    ("lang", "prompt", "title", "button"),
    [
        ("en", "In the beginning God created the heaven and the", "Greedy decoding", "Generate"),
        ("zh", "明月几时有，把酒问青", "贪心解码", "生成"),
    ],
)
def test_the_first_text_is_one_that_the_model_can_read(
    here: Page, bilingual: str, lang: str, prompt: str, title: str, button: str
) -> None:
    opened(here, f"{bilingual}/next?lang={lang}")
    expect(here.locator("#prompt")).to_have_value(prompt)
    here.get_by_role("button", name=button, exact=True).click()
    expect(here.locator('[data-path="greedy"] h3')).to_have_text(title)
    shown = here.locator('[data-path="beam"] .continuation').inner_text()
    assert "\ufffd" not in shown[:-1]


def test_a_model_without_chinese_begins_in_english(here: Page, address: str) -> None:
    opened(here, f"{address}/next?lang=zh")
    expect(here.locator("#prompt")).to_have_value("In the beginning God created the heaven and the")
