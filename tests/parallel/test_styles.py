"""Vocabulary-parallel heads in models; see cases_styles.py."""

from pathlib import Path

import pytest

from parallel import ranks

MODULE = "cases_styles"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("styles")
    ranks.launch(made, MODULE)
    return made


@pytest.mark.parametrize(("name", "world"), ranks.names(MODULE))
def test_styles(folder: Path, name: str, world: int) -> None:
    assert ranks.outcome(folder, name, world) == ""
