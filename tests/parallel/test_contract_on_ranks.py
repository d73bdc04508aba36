"""The contract suite on 2 to 4 ranks; see cases_contract.py."""

from pathlib import Path

import pytest

from parallel import ranks

MODULE = "cases_contract"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("contract")
    ranks.launch(made, MODULE)
    return made


@pytest.mark.parametrize(("name", "world"), ranks.names(MODULE))
def test_contract_on_ranks(folder: Path, name: str, world: int) -> None:
    assert ranks.outcome(folder, name, world) == ""
