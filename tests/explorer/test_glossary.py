"""The glossary: on its page, and in the documents, in both languages."""

import json
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

ROOT = Path(__file__).resolve().parents[2]
TERMS = json.loads((ROOT / "explorer/src/i18n/glossary.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("lang", "title"), [("en", "Glossary"), ("zh", "术语表")])
def test_the_page_has_every_term(page: Page, lang: str, title: str) -> None:
    page.goto(f"/glossary?lang={lang}")
    expect(page.locator("h1")).to_have_text(title)
    shown = page.locator(".glossary dd").all_inner_texts()
    assert shown == [term["definition"][lang] for term in TERMS]


def test_the_documents_have_every_term() -> None:
    english = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    chinese = (ROOT / "docs/glossary.zh.md").read_text(encoding="utf-8")
    for term in TERMS:
        assert f"| {term['en']} | {term['definition']['en']} |" in english
        assert f"| {term['zh']} | {term['en']} | {term['definition']['zh']} |" in chinese
