"""Exports of the pages Learn and Train: the numbers on the page, code that runs."""

import csv
import io
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from playwright.sync_api import Page

from explorer.sites import saved
from explorer.test_python import STEPS, assert_same
from explorer.test_python import run as values_of
from explorer.test_train import begin, figures, here, opened, run
from lmhead import reference as ref

__all__ = ["here", "run"]  # fixtures

SVG = "{http://www.w3.org/2000/svg}"
SET = "h=-1.5,2.2,0.7&norm=1&t=0.3&draws=100&target=4&eps=0.3&chain="
CHAIN = "top_k:4,temperature:1.5,min_p:0.2,typical_p:0.9:off,top_p:0.9"


def document(page: Page) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(saved(page, "json").read_text())
    return found


def table(page: Page) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(saved(page, "csv").read_text(), newline="")))


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_story_is_the_library_s(page: Page, lang: str) -> None:
    page.goto(f"/learn?{SET}{CHAIN}&lang={lang}")
    story = document(page)
    assert (story["command"], story["schema"]) == ("learn", 1)
    z = np.array(story["logits"])
    h = ref.layer_norm(np.array(story["hidden"]["given"]))
    np.testing.assert_allclose(h, story["hidden"]["used"], atol=1e-12)
    np.testing.assert_allclose(ref.linear(h, np.array(story["weight"])), z, atol=1e-12)
    np.testing.assert_allclose(ref.softmax(z, temperature=0.3), story["softmax"]["p"], atol=1e-12)
    loss = story["loss"]
    assert loss["value"] == pytest.approx(float(ref.cross_entropy(z, 4, label_smoothing=0.3)))
    gradient = ref.cross_entropy_backward(z, 4, label_smoothing=0.3)
    np.testing.assert_allclose(gradient, loss["gradient"], atol=1e-12)
    rows = table(page)
    assert [row["text"] for row in rows] == story["words"]
    assert [float(row["logit"]) for row in rows] == pytest.approx(story["logits"])
    assert [float(row["softmax_p"]) for row in rows] == pytest.approx(story["softmax"]["p"])
    assert [float(row["sampler_p"]) for row in rows] == pytest.approx(story["sampler"]["p"])
    assert [float(row["gradient"]) for row in rows] == pytest.approx(loss["gradient"])


def test_the_story_s_lines_are_one_program(page: Page) -> None:
    page.goto(f"/learn?{SET}{CHAIN}")
    steps = document(page)["steps"]
    titles = page.locator(".contents a").all_inner_texts()
    assert [step["title"] for step in steps] == titles
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    code = page.locator('[data-line="python"]').text_content() or ""
    values = values_of(code, {})
    listed = [(step, value) for step in steps for value in step["values"]]
    assert len(values) == len(listed) > STEPS
    for value, (step, want) in zip(values, listed, strict=True):
        assert_same(value, want, step["python"])


def test_the_story_as_picture_and_report(page: Page) -> None:
    page.goto("/learn?lang=zh")
    drawn = "".join(ElementTree.fromstring(saved(page, "svg").read_text()).itertext())
    today = datetime.now(UTC).date().isoformat()
    titles = page.locator(".contents a").all_inner_texts()
    for part in ["交税", "模型：", "提示词：我爱", "设置：h = (2.0, 1.0, −1.0)", today, *titles]:
        assert part in drawn
    assert len(titles) == STEPS
    report = saved(page, "html").read_text()
    assert "<script" not in report
    assert "交税" in report
    assert "ref.softmax" in report
    assert heads(report) == ["编号", "文字", "logit", *heads(report)[3:]]
    assert "梯度 p − y" in heads(report)


def heads(report: str) -> list[str]:
    """The headings of a report's tables."""
    return re.findall(r"<th scope=\"col\"[^>]*>([^<]*)<", report)


def test_a_picture_has_its_stripes_and_says_which_line_is_which(page: Page) -> None:
    opened(page, "v=50000&d=512&n=4096")
    tree = ElementTree.fromstring(saved(page, "svg").read_text())
    (stripes,) = tree.iter(f"{SVG}pattern")
    assert len({rect.attrib["fill"] for rect in stripes}) == 2
    filled = [r for r in tree.iter(f"{SVG}rect") if r.get("fill") == f"url(#{stripes.get('id')})"]
    assert len(filled) == 1
    texts = ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]
    assert "memory by number of tokens" in texts
    assert (texts.count("all logits"), texts.count("streamed")) == (2, 2)  # bars, and lines
    assert any(t.text and t.text.startswith("With 4,096 tokens") for t in tree.iter(f"{SVG}title"))


def test_words_of_a_report_keep_their_letters_together(page: Page, here: str, run: Path) -> None:
    begin(run)
    page.goto(f"{here}?lang=zh" if "?" not in here else f"{here}&lang=zh")
    page.wait_for_selector('[data-chart="loss"]')
    report = saved(page, "html").read_text()
    assert not [head for head in heads(report) if head.isascii()]
    assert "3.1000" in report
    page.goto("about:blank")
    page.set_content(report)
    broken = page.locator("td").evaluate_all(
        """cells => cells.filter(cell => !cell.textContent.trim().includes(' ')
          && cell.firstChild && (range => { range.selectNodeContents(cell);
            return range.getClientRects().length > 1 })(document.createRange()))
          .map(cell => cell.textContent)"""
    )
    assert broken == []


def test_the_memory_of_the_loss(page: Page) -> None:
    opened(page, "v=50000&d=512&n=4096")
    shown, exported = figures(page), document(page)
    assert (exported["command"], exported["run"]) == ("train", None)
    both = [exported["memory"][way]["tensors"] for way in ("dense", "streamed")]
    named = {tensor["name"]: tensor["bytes"] for tensors in both for tensor in tensors}
    assert named.items() <= shown.items()
    assert named
    for way in ("dense", "streamed"):
        tensors = exported["memory"][way]["tensors"]
        assert exported["memory"][way]["bytes"] == sum(t["bytes"] for t in tensors)
    rows = table(page)
    assert [int(row["bytes"]) for row in rows] == [t["bytes"] for ts in both for t in ts]
    picture = saved(page, "svg").read_text(encoding="utf-8")
    assert "V = 50,000 · D = 512 · N = 4,096 · float32 · max_bytes = 128" in picture


def test_the_run(page: Page, here: str, run: Path) -> None:
    begin(run)
    page.goto(here)
    page.wait_for_selector('[data-chart="loss"]')
    exported = document(page)
    assert (exported["run"], exported["step"], exported["steps"]) == ("my run", 200, 400)
    assert (exported["best_step"], exported["best_loss"]) == (200, pytest.approx(3.1))
    assert [point["step"] for point in exported["train"]] == list(range(10, 201, 10))
    assert [point["loss"] for point in exported["valid"]] == pytest.approx([3.6, 3.1])
    assert [sample["text"] for sample in exported["samples"]] == [
        "Written at 100.",
        "Written at 200.",
    ]
    rows = [list(row.values()) for row in table(page)]
    assert [float(row[1]) for row in rows] == pytest.approx([p["loss"] for p in exported["train"]])
    assert page.locator('[data-line="command"]').text_content() == "lmhead explore --run 'my run'"
    ElementTree.fromstring(saved(page, "svg").read_text())
    assert "Written at 200." in saved(page, "html").read_text()
