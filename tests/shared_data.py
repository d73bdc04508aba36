"""Data files that are not in the repository: real models and texts.

They are in the folder that the environment variable LMHEAD_DATA names, by default `../shared/data`
beside the clone. Without a file that it needs a test is skipped; the reason names the variable.
"""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("LMHEAD_DATA") or Path(__file__).parents[2] / "shared" / "data")

WIKITEXT_TEST = FOLDER / "wikitext-2" / "test.txt"
SMOLLM2_TOKENIZER = FOLDER / "smollm2" / "tokenizer.json"
# Hidden states on four windows of WikiText-2, and the weight of the head.
SMOLLM2_STATES = FOLDER / "smollm2" / "wt2_hidden_2048.safetensors"
SMOLLM2_HEAD = FOLDER / "smollm2" / "lm_head_f16.safetensors"
STORIES = FOLDER / "stories260K" / "stories260K.bin"


def needs(*files: Path) -> pytest.MarkDecorator:
    """Skip a test unless all of these files exist."""
    missing = [str(file.relative_to(FOLDER)) for file in files if not file.is_file()]
    reason = f"set LMHEAD_DATA to a folder with {', '.join(missing)}"
    return pytest.mark.skipif(bool(missing), reason=reason)
