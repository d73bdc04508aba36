"""All cases on 1 to 4 ranks, started together: see ranks.py and cases_*.py."""

from pathlib import Path

import pytest
from session_folder import session_folder

from parallel import ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the cases have left how they ended."""
    return session_folder(tmp_path_factory, "on-ranks", ranks.launch)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "world"), ranks.names())
def test_on_ranks(folder: Path, name: str, world: int) -> None:
    assert ranks.outcome(folder, name, world) == ""
