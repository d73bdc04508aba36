"""Score a corpus into a Parquet file, one row per token, and read it with pyarrow.

The command does the same: `lmhead score MODEL FILES... --out scores.parquet --top-k 5`. A run that
was stopped continues where it was.

    pip install 'lmhead[parquet]'
    python examples/score_to_parquet.py tiny README.md docs/*.md --out scores.parquet
    python examples/score_to_parquet.py --quick        # two sentences, seconds
"""

import argparse
import tempfile
from pathlib import Path

import pyarrow.compute as pc
from pyarrow import parquet

import lmhead
from lmhead.analysis import score_files


def main() -> None:
    """Score the files and print the most surprising tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="tiny", help="what open_model takes")
    parser.add_argument("texts", nargs="*", type=Path, help="UTF-8 files")
    parser.add_argument("--out", type=Path, default=Path("scores.parquet"))
    parser.add_argument("--quick", action="store_true", help="score two sentences")
    given = parser.parse_args()

    texts = {str(path): path.read_text(encoding="utf-8") for path in given.texts}
    if given.quick:
        texts = {"a": "I love thee, and thou lovest me.", "b": "The sun rises in the east."}
        given.out = Path(tempfile.mkdtemp()) / "scores.parquet"
    elif not texts:
        parser.error("give at least one text, or --quick")

    model = lmhead.open_model(given.model)
    pieces = {name: lambda text=text: [text] for name, text in texts.items()}
    totals = score_files(model, pieces, given.out, top_k=5)
    for name, total in totals.items():
        print(f"{name}: perplexity {total.perplexity:.2f}, {total.tokens} tokens")

    table = parquet.read_table(given.out)
    order = pc.sort_indices(table, [("log_prob", "ascending")])[:5]
    print("Most surprising:")
    for row in table.take(order).to_pylist():
        print(
            f"  {row['text']!r} at {row['position']} of {row['file']}: {row['log_prob']:.2f} nats"
        )


if __name__ == "__main__":
    main()
