"""Datasets of the tasks in this folder: one JSONL file each."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset


def _load(name: str) -> dict[str, Dataset]:
    lines = (Path(__file__).parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def choice(**_: Any) -> dict[str, Dataset]:
    """Return the questions with four answers each."""
    return _load("choice")


def rolling(**_: Any) -> dict[str, Dataset]:
    """Return the texts."""
    return _load("rolling")


def generation(**_: Any) -> dict[str, Dataset]:
    """Return the adjectives and their opposites."""
    return _load("generation")
