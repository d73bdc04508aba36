from pathlib import Path

import pytest

from server.serve_tiny import write_page


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return write_page(tmp_path / "page")
