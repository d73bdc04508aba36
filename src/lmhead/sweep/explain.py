"""What a question will cost, in words, from the plan that would be followed."""

from __future__ import annotations

from lmhead.sweep.plan import Plan
from lmhead.sweep.questions import Questions


def explain(title: str, questions: Questions, itemsize: int) -> str:
    """Products, tiles and bytes of the two kinds of question, and of building the logits."""
    source = questions.source
    gflop = f"{2e-9 * source.rows * source.vocab * source.hidden_size:,.2f} GFLOP"
    dense = source.rows * source.vocab * itemsize
    loss = questions.plan(retain=True)
    return "\n".join(
        [
            title,
            f"  an answer               1 product of {gflop}; {_cut(questions.plan())}",
            f"  a loss with gradients   {3 if loss.retained else 4} products; {_cut(loss)}",
            f"  building it             1 product; {dense:,} bytes that stay",
        ]
    )


def _cut(plan: Plan) -> str:
    tiles = plan.n_chunks * plan.n_tiles
    return f"{tiles:,} tiles of {plan.words:,} words x {plan.tokens:,} tokens; {plan.bytes:,} bytes"
