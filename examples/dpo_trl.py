"""DPO with TRL: prefer one completion over another, with the log-probabilities of lmhead.

Only `patch()` differs from a plain TRL program. TRL passes the weight of the output layer to one
function, which the patch replaces: no logits in memory, and ignored positions cost nothing.

    pip install 'lmhead[models]' trl
    python examples/dpo_trl.py --model FOLDER
    python examples/dpo_trl.py --quick          # a random model, seconds
"""

import argparse
import copy
from pathlib import Path

import datasets
import trl
from hf_model import load

from lmhead.integrations import trl as lmhead_trl

PAIRS = [
    ("What is the capital of France?", " Paris.", " I do not know."),
    ("Name a fruit.", " An apple.", " A table."),
    ("How many days has a week?", " Seven.", " Twelve."),
    ("What colour is snow?", " White.", " Green."),
]


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder [default: SmolLM2]")
    parser.add_argument("--out", type=Path, default=Path("tuned-dpo"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="two steps of a random model")
    given = parser.parse_args()

    model, tokenizer = load(given.model, quick=given.quick)
    names = ("prompt", "chosen", "rejected")
    with lmhead_trl.patch():
        trainer = trl.DPOTrainer(
            model=model,
            ref_model=copy.deepcopy(model),
            args=trl.DPOConfig(
                output_dir=str(given.out),
                max_steps=2 if given.quick else given.steps,
                per_device_train_batch_size=2,
                learning_rate=1e-5,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=datasets.Dataset.from_list(
                [dict(zip(names, pair, strict=True)) for pair in PAIRS]
            ),
            processing_class=tokenizer,
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")  # the first is log 2


if __name__ == "__main__":
    main()
