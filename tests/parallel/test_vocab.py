"""Vocabulary-parallel scores on 1 to 4 ranks; see cases_vocab.py."""

from pathlib import Path

import pytest

from parallel import ranks

MODULE = "cases_vocab"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vocab")
    ranks.launch(made, MODULE)
    return made


@pytest.mark.parametrize(("name", "world"), ranks.names(MODULE))
def test_vocab(folder: Path, name: str, world: int) -> None:
    assert ranks.outcome(folder, name, world) == ""
