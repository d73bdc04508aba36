"""Fine-tune SmolLM2-135M on a text file, on a CPU, with transformers' own Trainer.

Only `lmhead.replace_head(model)` differs from a plain program. With it a step never holds the
logits of its tokens (49,152 per token), and the losses are the same.

    lmhead models add smollm2
    pip install 'lmhead[models]' accelerate
    python examples/finetune_smollm2.py my.txt --steps 50 --out tuned
    lmhead generate tuned "Once upon a time"
"""

import argparse
import shutil
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset

import lmhead
from lmhead.models import JsonTokenizer, bundled
from lmhead.models.gguf import unpack


class Windows(Dataset):
    """The text cut into windows of `block` tokens; each is its own target."""

    def __init__(self, ids: list[int], block: int) -> None:
        count = len(ids) // block
        self.rows = torch.tensor(ids[: count * block]).view(count, block)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


def main() -> None:
    """Read the arguments, train, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="text to train on, UTF-8")
    parser.add_argument("--out", type=Path, default=Path("tuned"), help="folder of the result")
    parser.add_argument("--model", type=Path, help="Hugging Face folder [default: SmolLM2]")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--block", type=int, default=256, help="tokens per row")
    parser.add_argument("--rows", type=int, default=4, help="rows per micro-batch")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--grad-filter", type=float, help="tail mass of the gradient filter, 0.02")
    given = parser.parse_args()

    # The GGUF file of the package, as a Hugging Face folder.
    folder = given.model or unpack(bundled.add("smollm2"))
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    data = Windows(tokenizer.encode(given.text.read_text(encoding="utf-8")), given.block)
    if not len(data):
        parser.error(f"{given.text} must have at least {given.block} tokens, or --block be smaller")

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    lmhead.replace_head(model, grad_filter=given.grad_filter)

    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(given.out),
            max_steps=given.steps,
            per_device_train_batch_size=given.rows,
            gradient_accumulation_steps=given.accumulate,
            learning_rate=given.learning_rate,
            lr_scheduler_type="cosine",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=data,
    )
    trainer.train()
    trainer.save_model(str(given.out))
    shutil.copy(folder / "tokenizer.json", given.out)
    print(f"Saved. Try: lmhead generate {given.out} 'Once upon a time'")


if __name__ == "__main__":
    main()
