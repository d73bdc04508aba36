"""Exports of the pages Lens and Compare: the document of the command, code that runs."""

import csv
import io
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from playwright.sync_api import Page
from server.serve_tiny import running
from tiny_models import write_model

from explorer.sites import saved
from explorer.test_export import assert_near
from explorer.test_python import run
from lmhead.cli import main
from lmhead.explorer import page_folder
from lmhead.models import open_model

TEXT = "hello ab cab hello lo"
LONG = " ".join(["hello", "ab cab", "lo"] * 40)  # more than the models see at once
SAMPLERS = "what=samplers&ta=0.6&ka=9&pa=1&tb=1.2&ob=llama.cpp"


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("two words")
    return {
        "one": str(write_model(folder / "one")),
        "two": str(write_model(folder / "two", seed=1)),
    }


@pytest.fixture(scope="module")
def address(given: dict[str, str]) -> Iterator[str]:
    models = {name: open_model(path) for name, path in given.items()}
    with running(page_folder(), models=models, given=given) as port:
        yield f"http://127.0.0.1:{port}"


def show(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".exports")
    page.wait_for_load_state("networkidle")


def line(page: Page, kind: str) -> str:
    found = page.locator(f"[data-line={kind}]").text_content()
    assert found is not None
    return found


def printed(command: str) -> dict[str, Any]:
    """What a copied line prints."""
    words = shlex.split(command)
    assert words[0] == "lmhead"
    result = CliRunner().invoke(main, words[1:])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def unnamed(document: dict[str, Any]) -> dict[str, Any]:
    """Without the models' names: the page has those that it was started with."""
    for side in ("model", "a", "b"):
        if side in document:
            document[side].pop("name")
    return document


@pytest.mark.parametrize("target", ["", "&target=260"])
def test_the_lens(here: Page, address: str, target: str) -> None:
    show(here, f"{address}/lens?prompt=hello+'ab'{target}")
    document = json.loads(saved(here, "json").read_text())
    want = printed(line(here, "command"))
    assert_near(unnamed(document), unnamed(want))
    scope: dict[str, Any] = {}
    run(line(here, "python"), scope)
    assert_near(scope["result"].to_json()["layers"], want["layers"])
    rows = list(csv.DictReader(io.StringIO(saved(here, "csv").read_text(), newline="")))
    cells = [cell for layer in want["layers"] for cell in layer["cells"]]
    for name in ("target_p", "target_rank", "entropy", "kl"):
        unit = {"target_rank": "_from_0", "entropy": "_nats", "kl": "_nats"}
        column = name + unit.get(name, "")
        assert [float(r[column]) for r in rows] == pytest.approx([c[name] for c in cells], abs=1e-6)


def test_a_picture_of_a_long_lens_has_its_layers_in_front(here: Page, address: str) -> None:
    show(here, f"{address}/lens?prompt={'ab hello ' * 9}")
    box = here.locator('[data-chart="grid"]')
    box.evaluate("box => { box.scrollLeft = 200 }")
    here.wait_for_function("box => box.scrollLeft > 0", arg=box.element_handle())
    tree = ElementTree.fromstring(saved(here, "svg").read_text())
    texts = [
        ("".join(t.itertext()), float(t.attrib["x"]))
        for t in tree.iter("{http://www.w3.org/2000/svg}text")
        if "x" in t.attrib
    ]
    assert {"embedding", "layer 1", "output"} <= {text for text, _ in texts}
    assert max(x for text, x in texts if text in ("layer 1", "read", "target")) < min(
        x for text, x in texts if text.startswith("ab")
    )
    here.wait_for_function("box => box.scrollLeft > 0", arg=box.element_handle())


@pytest.mark.parametrize("text", [TEXT, LONG])
@pytest.mark.parametrize("sides", ["what=models", SAMPLERS])
def test_along_a_text(here: Page, address: str, sides: str, text: str) -> None:
    show(here, f"{address}/compare?where=text&text={text}&{sides}")
    document = json.loads(saved(here, "json").read_text())
    want = printed(line(here, "command"))
    assert_near(unnamed(document), unnamed(want))
    (totals,) = run(line(here, "python"), {})
    assert totals[0] == pytest.approx(want["kl"])
    rows = list(csv.DictReader(io.StringIO(saved(here, "csv").read_text(), newline="")))
    assert len(rows) == want["positions"]


@pytest.mark.parametrize("sides", ["what=models", SAMPLERS])
def test_one_next_token(here: Page, address: str, sides: str) -> None:
    show(here, f"{address}/compare?prompt=hello+ab&top=200&{sides}")
    document = json.loads(saved(here, "json").read_text())
    scope: dict[str, Any] = {}
    run(line(here, "python"), scope)
    values = [scope["result_a"], scope["result_b"]]
    for side, value, command in zip("ab", values, line(here, "command").splitlines(), strict=True):
        want = {t.piece.id: t.processed_p for t in value.tokens}
        printed(f"{command.replace('lmhead next', 'lmhead next --json', 1)}")
        shown = [word for word in document["tokens"] if word["id"] in want]
        assert len(shown) > 100
        for word in shown:
            assert word[f"p_{side}"] == pytest.approx(want[word["id"]], abs=1e-6)


def test_paths_stay_out_of_a_report(here: Page, address: str, given: dict[str, str]) -> None:
    show(here, f"{address}/compare?where=text&text={TEXT}")
    assert str(Path(given["one"]).parent) not in saved(here, "html").read_text()
