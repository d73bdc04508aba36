"""FSDP2, DDP and ZeRO around an `LMHead`; see cases_fsdp.py."""

from pathlib import Path

import pytest

from parallel import ranks

MODULE = "cases_fsdp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("fsdp")
    ranks.launch(made, MODULE)
    return made


@pytest.mark.parametrize(("name", "world"), ranks.names(MODULE))
def test_fsdp(folder: Path, name: str, world: int) -> None:
    assert ranks.outcome(folder, name, world) == ""
