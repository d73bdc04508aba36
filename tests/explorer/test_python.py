"""The Python lines on the page, run: they give the numbers that the page shows."""

import ast
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page
from preloaded_python import preloaded_python

STEPS = 18
OFF = "temperature:0.5:off,top_k:5:off,top_p:0.8:off,min_p:0.1:off,typical_p:0.9:off"
SETTINGS = [
    "draws=1",
    "h=-1.5,2.2,0.7&norm=1&stretch=3&c=-4&t=0.3&draws=1000&target=4&eps=0.3&steps=5&rate=0.2",
    "big=90&chain=top_k:4,temperature:1.5,min_p:0.2,typical_p:0.9:off,top_p:0.9&draws=100",
    "chain=top_k:3,typical_p:0.9,top_p:0.7,min_p:0.3,temperature:0.7&seed=9007199254740991",
    "gamma=2&beta=-1&f=1.5&bias=3&batch=3&positions=5&changed=4&low=-120&steps=2&eps=0.1&target=3",
    "width=1024&initseed=4294967295",
    "width=4&initseed=7",
    f"big=20&format=fp16&chain={OFF}&seed=7&x=-2,0.5,4",
]


@pytest.mark.parametrize("query", SETTINGS)
def test_the_python_on_the_page_gives_the_page_s_numbers(page: Page, query: str) -> None:
    page.goto(f"/learn?{query}")
    scope: dict[str, Any] = {}
    blocks: list[tuple[str, str]] = page.locator("figure.python pre code").evaluate_all(
        "blocks => blocks.map(code => [code.textContent, code.dataset.values])"
    )
    assert len(blocks) == STEPS
    for code, values in blocks:
        got, shown = run(code, scope), json.loads(values)
        assert len(got) == len(shown), code
        for value, want in zip(got, shown, strict=True):
            assert_same(value, want, code)


def run(code: str, scope: dict[str, Any]) -> list[Any]:
    """The values of the expressions among the statements; of a print, what it prints."""
    values = []
    for statement in ast.parse(code).body:
        match statement:
            case ast.Expr(ast.Call(ast.Name("print"), args)):
                one = args[0] if len(args) == 1 else ast.Tuple(args, ast.Load())
                statement = ast.Expr(one)
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("error")
            if isinstance(statement, ast.Expr):
                values.append(eval(ast.unparse(statement), scope))
            else:
                exec(ast.unparse(statement), scope)
    return values


def assert_same(value: Any, want: Any, code: str) -> None:
    got = np.atleast_1d(np.asarray(value))
    named = {"Infinity": np.inf, "-Infinity": -np.inf, "NaN": np.nan}
    listed = want if isinstance(want, list) else [want]
    expected = np.array([named.get(x, x) if isinstance(x, str) else x for x in listed], dtype=float)
    tolerance = {np.dtype(np.float16): 2e-3, np.dtype(np.float32): 1e-6}.get(got.dtype, 1e-10)
    assert got.shape == expected.shape, code
    np.testing.assert_allclose(
        got.astype(float), expected, rtol=tolerance, atol=tolerance, err_msg=code
    )


def test_copied_python_prints_its_results_as_a_file_and_at_the_prompt(
    page: Page, tmp_path: Path
) -> None:
    page.goto("/learn?steps=2")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    parts = []
    buttons = page.locator("figure.python button")
    for at in range(buttons.count()):
        buttons.nth(at).click()
        parts.append(page.evaluate("() => navigator.clipboard.readText()"))
    assert len(parts) == STEPS
    code = "".join(parts)
    file = tmp_path / "copied.py"
    file.write_text(code)
    ran = subprocess.run([preloaded_python(), file], capture_output=True, text=True, check=True)
    typed = subprocess.run(
        [sys.executable, "-i"], input=code + "\n", capture_output=True, text=True, check=True
    )
    assert "Error" not in typed.stderr
    assert len(ran.stdout.splitlines()) >= 2 * STEPS
    assert typed.stdout == ran.stdout
