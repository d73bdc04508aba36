"""Collect the fenced examples of every Markdown page as tests; see tests/markdown_examples.py."""

from pathlib import Path

import pytest
from markdown_examples import MarkdownPage

pytest_plugins = ["pytester"]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Return the examples of a Markdown page."""
    if file_path.suffix == ".md":
        page: MarkdownPage = MarkdownPage.from_parent(parent, path=file_path)
        return page
    return None
