"""GRPO with TRL: sample answers, score them by a function, raise the probability of good ones.

Only `patch()` differs from a plain TRL program. The reward is simple: short answers with digits.

    pip install 'lmhead[models]' trl
    python examples/grpo_trl.py --model FOLDER
    python examples/grpo_trl.py --quick         # a random model, seconds
"""

import argparse
from pathlib import Path
from typing import Any

import datasets
import trl
from hf_model import load

from lmhead.integrations import trl as lmhead_trl

PROMPTS = ["2 + 3 =", "10 - 4 =", "One, two, three,", "The year is"]


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the share of digits of each completion, less a little for its length."""
    return [
        sum(letter.isdigit() for letter in text) / max(1, len(text)) - 0.001 * len(text)
        for text in completions
    ]


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="Hugging Face folder [default: SmolLM2]")
    parser.add_argument("--out", type=Path, default=Path("tuned-grpo"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="two steps of a random model")
    given = parser.parse_args()

    model, tokenizer = load(given.model, quick=given.quick)
    with lmhead_trl.patch():
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=trl.GRPOConfig(
                output_dir=str(given.out),
                max_steps=2 if given.quick else given.steps,
                per_device_train_batch_size=4,
                num_generations=4,
                max_completion_length=8 if given.quick else 24,
                temperature=0.9,
                learning_rate=1e-5,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=datasets.Dataset.from_list([{"prompt": text} for text in PROMPTS]),
            processing_class=tokenizer,
        )
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print("mean reward of each step:", " ".join(f"{value:.3f}" for value in rewards))


if __name__ == "__main__":
    main()
