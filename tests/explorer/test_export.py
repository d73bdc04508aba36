"""Exports of a page: the numbers are the library's, and no token acts as code in a file."""

import csv
import io
import json
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page, expect
from server.serve_tiny import running

from explorer.sites import FORMULA, HOSTILE, saved, site_models
from explorer.test_python import run
from lmhead.analysis import NextTokens
from lmhead.cli import _json, main
from lmhead.explorer import page_folder

SVG = "{http://www.w3.org/2000/svg}"
SAMPLED = "prompt=hello+ab&t=0.8&k=20&p=0.9&m=0.01&seed=5&top=12"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    models, given = site_models(tmp_path_factory.mktemp("models"))
    with running(page_folder(), models=models, given=given) as port:
        yield f"http://127.0.0.1:{port}"


def show(page: Page, address: str, query: str) -> None:
    page.goto(f"{address}/next?{query}")
    page.wait_for_selector(".exports")
    page.wait_for_load_state("networkidle")


def assert_near(got: Any, want: Any, where: str = "", near: float = 1e-6) -> None:
    """The same tree, numbers to the given tolerance."""
    if isinstance(want, dict):
        assert isinstance(got, dict), where
        assert list(got) == list(want), where
        for key in want:
            assert_near(got[key], want[key], f"{where}.{key}", near)
    elif isinstance(want, list):
        assert len(got) == len(want), where
        for at, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_near(one, other, f"{where}[{at}]", near)
    elif isinstance(want, float):
        assert got == pytest.approx(want, abs=near, rel=near), where
    else:
        assert got == want, where


@pytest.mark.parametrize(
    ("query", "count"),
    [
        (SAMPLED, 12),
        (f"{SAMPLED}&order=llama.cpp", 12),
        ("prompt=你好+hello&top=300", 300),
        # Tokens that a penalty lifts come too.
        ("prompt=hello,+world!+How+are+you?&rep=0.5&top=4", 7),
        ("prompt=hello+ab&typ=0.3&freq=-1.5&order=llama.cpp&t=0.7&seed=9007199254740991&top=9", 13),
    ],
)
def test_json_and_csv_are_the_command_s(here: Page, address: str, query: str, count: int) -> None:
    show(here, address, query)
    line = here.locator('[data-line="command"]').text_content() or ""
    want = json.loads(shell(line.replace("lmhead next", "lmhead next --json", 1)))
    assert len(want["tokens"]) == count
    got = json.loads(saved(here, "json").read_text())
    # A row of logits comes to the page in float32.
    assert_near(got, {**want, "model": {**want["model"], "name": "tiny"}}, near=5e-6)
    expect(here.locator('[data-chart="exported"]')).to_have_text("Saved as lmhead-next.json.")
    rows = list(csv.DictReader(io.StringIO(saved(here, "csv").read_text(), newline="")))
    assert [int(row["id"]) for row in rows] == [token["id"] for token in want["tokens"]]
    shares = [token["processed_p"] for token in want["tokens"]]
    assert [float(row["processed_p"]) for row in rows] == pytest.approx(shares, abs=1e-6)


def test_csv_has_every_token_and_no_formula(here: Page, address: str) -> None:
    show(here, address, "model=hostile&prompt=a&top=300")
    text = saved(here, "csv").read_bytes().decode("utf-8")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [int(row["rank_from_0"]) for row in rows] == list(range(300))
    assert sum(float(row["p"]) for row in rows) == pytest.approx(1, abs=1e-6)
    texts = {row["text"] for row in rows}
    assert texts >= {HOSTILE[0], f"'{FORMULA}"}
    assert FORMULA not in texts


@pytest.mark.parametrize(("theme", "top"), [("light", 300), ("dark", 40)])
def test_pictures_stand_alone(here: Page, address: str, theme: str, top: int) -> None:
    show(here, address, f"model=hostile&prompt=a&top={top}&theme={theme}")
    path = saved(here, "svg")
    tree = ElementTree.fromstring(path.read_text())
    names = {element.tag.removeprefix(SVG) for element in tree.iter()}
    assert names <= {"svg", "title", "rect", "g", "text", "line", "path"}
    texts = "".join("".join(element.itertext()) for element in tree.iter(f"{SVG}text"))
    if top == 300:  # one of them may go on in a second line
        assert "<img␣src=x␣onerror=alert(1)>" in texts
        assert "⟨202E⟩gnp" in texts
    written = path.read_text()
    assert not re.search(r'\s(class|style)=|var\(|href|url\(|="NaN', written)
    width, height = (float(tree.attrib[side]) for side in ("width", "height"))
    picture = saved(here, "png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    scale = 2 if top == 40 else 16_384 / height  # what a canvas can be
    size = struct.unpack(">2I", picture[16:24])
    assert size == pytest.approx((scale * width, scale * height), abs=2)
    assert len(picture) > 1000 * top  # one with nothing on it is far smaller


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_report_is_a_page_of_its_own(here: Page, address: str, lang: str) -> None:
    show(here, address, f"model=hostile&top=300&lang={lang}&prompt=<script>alert(3)</script>&t=0.5")
    path = saved(here, "html")
    text = path.read_text()
    scripts = re.findall(r"<script[^>]*>", text)
    assert [re.sub(r"[0-9a-f]{20,}", "N", tag) for tag in scripts] == [
        '<script type="application/json">',
        '<script nonce="N">',
    ]
    assert not re.search(r"<img|javascript:|https?://(?!www\.w3\.org/2000/svg)", text)
    here.goto("about:blank")
    requests: list[str] = []
    here.on("request", lambda request: requests.append(request.url))
    here.set_content(text)
    assert requests == []
    expect(here.locator("table")).to_have_count(3)
    expect(here.locator("table:not(.live-bars) tbody tr")).to_have_count(300 + 2)
    expect(here.locator("figure > svg")).to_have_count(1)  # the ranked tokens are interactive
    about = "\n".join(here.locator(".about").all_inner_texts())
    assert "hostile" in about
    assert "<script>alert(3)</script>" in about
    assert "temperature=0.5" in about
    named = HOSTILE[0].replace(" ", "␣")
    expect(here.locator("td").get_by_text(named, exact=True)).to_have_count(1)
    assert here.locator("img, iframe, link").count() == 0
    # The model is named without the folders of this machine.
    assert "tiny.bin" in text
    assert str(path.parent) not in text
    assert "/tmp" not in text


def copied(page: Page, kind: str) -> str:
    page.locator(f'[data-export="{kind}"]').click()
    expect(page.locator('[data-chart="exported"]')).to_have_text("Copied.")
    text: str = page.evaluate("() => navigator.clipboard.readText()")
    assert text == page.locator(f'[data-line="{kind}"]').text_content()
    page.evaluate("() => navigator.clipboard.writeText('')")
    return text


def page_words(page: Page) -> list[tuple[int, Any]]:
    found: list[tuple[int, float]] = page.locator('[data-chart="ranked"] tbody tr').evaluate_all(
        "rows => rows.map(row => [Number(row.dataset.id), Number(row.dataset.processed)])"
    )
    return [(id, pytest.approx(p, abs=1e-6)) for id, p in found]


def shell(line: str) -> str:
    """What a line prints: bash takes it apart, then the command runs in this process."""
    result = subprocess.run(
        [
            "bash",
            "-c",
            f"lmhead() {{ printf '%s\\0' \"$@\"; [ ! -p /dev/stdin ] || cat; }}\n{line}",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    *arguments, piped = result.stdout.split("\0")
    ran = CliRunner().invoke(main, arguments, input=piped)
    assert ran.exit_code == 0, ran.output
    return ran.stdout


@pytest.mark.parametrize(
    "query",
    [
        SAMPLED,
        'model=hostile&top=9&prompt=it\'s+"a"+$HOME+`ls`+\\%0Aline%1B[2J%E2%80%AE+!%25',
        "prompt=-x&t=1.5&order=llama.cpp&top=5",
        "prompt=-",
        "prompt=hello&more=262,259,263&p=0.5",
        "prompt=hello&more=262,259,262&freq=1.5&pres=0.7&rep=1.3&t=0.7",
        "prompt=hello&more=262,259,262&freq=1.5&order=llama.cpp",
    ],
)
def test_copied_lines_run_and_give_the_page_s_numbers(
    here: Page, address: str, query: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show(here, address, query)
    want = page_words(here)
    scope: dict[str, Any] = {}
    run(copied(here, "python"), scope)
    assert len(capsys.readouterr().out.splitlines()) == len(want)  # it prints every token
    found = scope["result"]
    assert isinstance(found, NextTokens)
    assert [(token.piece.id, token.processed_p) for token in found.tokens] == want
    line = copied(here, "command")
    assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202e]", line)
    printed = json.loads(shell(line.replace("lmhead next", "lmhead next --json", 1)))
    if "more" not in query:
        assert [(token["id"], token["processed_p"]) for token in printed["tokens"]] == want


def test_lines_can_be_taken_without_a_clipboard_and_by_keyboard(here: Page, address: str) -> None:
    here.goto(f"{address}/next?prompt=a")
    here.wait_for_selector(".exports")
    here.evaluate("() => Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    here.locator('[data-export="python"]').focus()
    here.keyboard.press("Enter")
    marked = here.evaluate("() => String(getSelection())")
    code = here.locator('[data-line="python"]').text_content() or ""
    assert marked.strip() == code.strip()
    here.locator('[data-export="json"]').focus()
    with here.expect_download() as download:
        here.keyboard.press("Space")
    assert Path(download.value.path()).stat().st_size > 500


def test_a_text_that_no_shell_can_say_has_no_command(here: Page, address: str) -> None:
    show(here, address, "prompt=a%00b")
    expect(here.locator('[data-export="command"]')).to_be_disabled()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_nothing_is_cut(here: Page, address: str, width: int, lang: str) -> None:
    here.set_viewport_size({"width": width, "height": 900})
    show(here, address, f"model=hostile&lang={lang}&prompt={'a<b>' * 10}")
    here.locator(".exports summary").click()
    outside = here.evaluate(
        "() => [...document.querySelectorAll('.exports *:not(pre code)')].filter(e =>"
        " e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []


def test_the_schema_is_the_command_line_s() -> None:
    source = Path(__file__).parents[2] / "explorer" / "src" / "export" / "jsonDocument.ts"
    assert f"SCHEMA = {_json.SCHEMA};" in source.read_text()
