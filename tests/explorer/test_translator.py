"""The translation model of a run on the Learn page, and its endpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, expect
from server.serve_tiny import ask, make_app, running, write_page

from lmhead.explorer import page_folder
from lmhead.models import load_translator
from lmhead.train import TrainConfig, train

NUMBERS = [(str(n), "".join("零一二三四五六七八九"[int(d)] for d in str(n))) for n in range(10, 60)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt little: its model need not be good."""
    folder = tmp_path_factory.mktemp("translator")
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"{a}\t{b}\n" for a, b in NUMBERS), encoding="utf-8")
    config = TrainConfig(
        task="translate", corpus=(str(pairs),), vocab_size=280, held_out=6, layers=1, heads=2,
        width=16, block=12, position="sinusoidal", batch_tokens=200, steps=20, warmup=5,
        learning_rate=0.01, eval_every=20, save_every=20, curve=False, threads=1,
    )  # fmt: skip
    train(config, folder / "my run")
    return folder / "my run"


@pytest.fixture(scope="module")
def served(run: Path) -> Iterator[str]:
    with running(page_folder(), models={}, run=run) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def learn(page: Page) -> Iterator[Page]:
    """A page that sends no more requests when the test has ended."""
    yield page
    page.goto("about:blank")


def test_the_head_s_predictions_are_the_model_s(run: Path, tmp_path: Path) -> None:
    app = make_app(write_page(tmp_path / "page"), models={}, run=run)
    found = ask(app, "POST", "/api/translate", json={"text": "42"}).json()
    translator = load_translator(run)
    best = translator.translate(["42"], num_beams=1)[0][0]
    assert found["text"] == best.text
    assert [step["id"] for step in found["steps"]] == list(best.ids)
    source = [token["id"] for token in found["source"]]
    assert source[-1] == translator.end
    target = torch.tensor([[translator.begin, *best.ids[:-1]]])
    with torch.no_grad():
        p = translator.model(torch.tensor([source]), target)[0].softmax(-1)
    for row, step in enumerate(found["steps"]):
        assert step["best"][0]["id"] == step["id"]  # greedy
        assert step["p"] == pytest.approx(float(p[row, step["id"]]), abs=1e-6)
        shares = [token["p"] for token in step["best"]]
        assert shares == pytest.approx(p[row].topk(5).values.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"text": " "}, 400, "wrong_length"),
        ({"text": "4" * 500}, 400, "wrong_length"),
        ({"text": 4}, 400, "wrong_value"),
        ({"text": "4", "beams": 2}, 400, "wrong_value"),
    ],
)
def test_what_cannot_be_translated(
    run: Path, tmp_path: Path, body: dict[str, object], status: int, code: str
) -> None:
    app = make_app(write_page(tmp_path / "page"), models={}, run=run)
    answer = ask(app, "POST", "/api/translate", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_run_without_a_translation_model(tmp_path: Path) -> None:
    page = write_page(tmp_path / "page")
    for run in (None, tmp_path / "not begun"):
        answer = ask(
            make_app(page, models={}, run=run), "POST", "/api/translate", json={"text": "4"}
        )
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "no_translation"
        assert str(tmp_path) not in answer.text


def test_the_step_shows_the_run_s_own_model(learn: Page, served: str, run: Path) -> None:
    learn.goto(f"{served}/learn?sentence=42&place=2")
    step = learn.locator('[data-chart="translator"]')
    expect(step.locator("label").first).to_contain_text("my run")
    best = load_translator(run).translate(["42"], num_beams=1)[0][0]
    expect(learn.locator('[data-chart="translated"]')).to_have_text(best.text)
    expect(learn.locator('[data-chart="predicted"] tbody tr')).to_have_count(5)
    expect(learn.locator('[data-chart="sofar"] .piece')).to_have_count(1)
    learn.locator('input[name="place"]').fill("1")
    expect(learn.locator('[data-chart="sofar"] .piece')).to_have_count(0)
    learn.locator("#sentence").fill("37")
    learn.locator("#sentence").press("Enter")
    learn.wait_for_function("() => location.search.includes('sentence=37')")
    other = load_translator(run).translate(["37"], num_beams=1)[0][0]
    expect(learn.locator('[data-chart="translated"]')).to_have_text(other.text)
    learn.reload()
    expect(learn.locator("#sentence")).to_have_value("37")


def test_without_such_a_run_the_toy_s_logits_are_shown(page: Page) -> None:
    page.goto("/learn")
    expect(page.locator('[data-chart="positions"] tbody tr')).to_have_count(6)
    expect(page.locator('[data-chart="translator"]')).to_have_count(0)
