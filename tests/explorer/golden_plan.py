"""Plans that hold the page's memory figures to the package: written to golden_plan.json.

In:  `lmhead.sweep.questions` alone.
Out: a JSON file that Vitest reads; `test_golden_plan.py` checks that it is up to date. After a
change, write it again with `python tests/explorer/golden_plan.py`.
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

from lmhead.sweep.questions import DEFAULT_MAX_BYTES, make_plan

FILE = Path(__file__).resolve().parents[2] / "explorer" / "tests" / "golden_plan.json"
VOCABS = [64, 4097, 49_152, 128_256, 262_144, 1_048_576]
WIDTHS = [16, 576, 4096, 16_384]
TOKENS = [16, 33, 2048, 8192, 50_001, 1_048_576]
BOUNDS = [2**16, 32 * 2**20, DEFAULT_MAX_BYTES, 512 * 2**20]


def golden() -> dict[str, Any]:
    """Plans of a loss with gradients: rows of (N, V, D, converts, max_bytes) and of the plan."""
    plans = []
    for vocab, width, tokens, converts, most in product(
        VOCABS, WIDTHS, TOKENS, (False, True), BOUNDS
    ):
        plan = make_plan(
            tokens, vocab, width, itemsize=4, converts=converts, max_bytes=most, retain=True
        )
        found = [plan.chunk_rows, plan.tile_tokens, int(plan.retained), plan.bytes]
        plans.append([tokens, vocab, width, int(converts), most, *found])
    return {"default_max_bytes": DEFAULT_MAX_BYTES, "plans": plans}


if __name__ == "__main__":
    FILE.write_text(json.dumps(golden(), separators=(",", ":")) + "\n", encoding="utf-8")
