"""What a notebook shows: the explorer's page in a cell, and tables of results."""

import re
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser

import lmhead
from lmhead.analysis import score
from lmhead.analysis.score import Score
from lmhead.notebook import ExplorerPage


class Cells(HTMLParser):
    """The text of each cell; raises if a tag is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_lazy_logits_say_what_they_are_and_compute_nothing() -> None:
    logits = lmhead.LMHead(4, 1000)(torch.full((3, 4), torch.nan)).exp()
    rows = dict(Cells(logits._repr_html_()).rows[1:])
    assert rows["shape"] == "(3, 1000)"
    assert rows["state"] == "not computed"
    assert "exp" in rows["recorded operations"]
    assert rows["bytes, if built"] == "12,000"


def test_answers() -> None:
    hidden, weight = torch.randn(9, 4), torch.randn(50, 4)
    ids = torch.arange(9)
    answers = lmhead.query(hidden, weight, entropy=True, top_k=2, log_prob=[ids, ids])
    rows = {row[0]: row[1:] for row in Cells(answers._repr_html_()).rows[1:]}
    assert rows.keys() == {
        "entropy", "top_k values", "top_k indices", "log_prob 0", "log_prob 1"
    }  # fmt: skip
    shape, values = rows["entropy"]
    assert shape == "(9,)"
    assert values.endswith("…")
    assert float(values.split(", ")[0]) == pytest.approx(float(answers.entropy[0]), rel=1e-5)


def test_sampled() -> None:
    sampled = lmhead.Sampler(top_k=3, seed=0)(torch.randn(10, 50))
    table = Cells(sampled._repr_html_())
    assert len(table.rows) == 1 + 8
    assert table.rows[1][:2] == ["0", str(int(sampled.token[0]))]
    assert table.rows[1][-1] == "3"
    assert "the first 8" in sampled._repr_html_()


def test_score() -> None:
    result = score(lmhead.open_model("tiny"), "I love thee.")
    rows = dict(Cells(result._repr_html_()).rows[1:])
    assert float(rows["perplexity"]) == pytest.approx(result.perplexity, rel=1e-5)
    Cells(Score(4, 2)._repr_html_())  # of an empty text


@pytest.fixture(scope="module")
def page() -> Iterator[ExplorerPage]:
    page = lmhead.explore(["tiny", lmhead.open_model("tiny")], lang="zh")
    yield page
    page.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(page.address)


@pytest.fixture(scope="module")
def notebook(page: ExplorerPage) -> Iterator[str]:
    """The address of another server on this machine, whose page shows the cell."""

    class Cell(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(f"<!doctype html>{page._repr_html_()}".encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Cell) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"localhost:{server.server_port}"
        server.shutdown()


def test_the_page_in_a_cell(browser: Browser, notebook: str) -> None:
    context = browser.new_context()
    here = context.new_page()
    here.goto(f"http://{notebook}/")
    frame = here.frame_locator("iframe")
    frame.get_by_role("combobox").or_(frame.get_by_role("textbox")).first.wait_for()
    assert frame.locator("html").get_attribute("lang") == "zh-Hans"
    context.close()


def test_no_other_site_may_show_it(page: ExplorerPage) -> None:
    with urllib.request.urlopen(page.address) as answer:
        policy = answer.headers["content-security-policy"]
        assert answer.headers["x-frame-options"] is None
    allowed = re.findall(r"frame-ancestors ([^;]+)", policy)[0].split()
    assert {re.sub(r"https?://([\d.a-z]+):\*", r"\1", one) for one in allowed} == {
        "'self'", "localhost", "127.0.0.1"
    }  # fmt: skip


def test_models_of_one_name_are_kept_apart(page: ExplorerPage) -> None:
    with urllib.request.urlopen(re.sub("/next.*", "/api/models", page.address)) as answer:
        assert answer.read().count(b'"tiny') >= 2


def test_unknown_language() -> None:
    with pytest.raises(ValueError, match="lang must be"):
        lmhead.explore("tiny", lang="fr")
