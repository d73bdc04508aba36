"""Distil a model into a smaller one from the teacher's hidden states, stored once.

A row of logits has V numbers, a hidden state has D. With the teacher's head, stored once, hidden
states give the same distributions: the file is V / D times smaller, and no logits are in memory,
neither when it is written nor when the student is trained.

    python examples/distill_hidden_states.py smollm2 book.txt
    python examples/distill_hidden_states.py --quick       # on tiny, seconds
"""

import argparse
import tempfile
from pathlib import Path

import torch

import lmhead
from lmhead import distill
from lmhead.nn import DecoderConfig, DecoderLM

TEXT = "I love thee, and thou lovest me. The sun rises in the east, and sets in the west. " * 40


def main() -> None:
    """Write the teacher's file, then train the student from it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("teacher", nargs="?", default="tiny", help="what open_model takes")
    parser.add_argument("text", nargs="?", type=Path, help="UTF-8 [default: a few sentences]")
    parser.add_argument("--width", type=int, default=64, help="hidden size of the student")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--window", type=int, default=64, help="tokens read at once")
    parser.add_argument("--quick", action="store_true", help="five steps")
    given = parser.parse_args()
    steps = 5 if given.quick else given.steps

    teacher = lmhead.open_model(given.teacher)
    text = TEXT if given.text is None else given.text.read_text(encoding="utf-8")
    ids = torch.tensor(teacher.tokenizer.encode(text))
    windows = ids[: len(ids) // given.window * given.window].view(-1, given.window)

    torch.manual_seed(0)
    student = DecoderLM(
        DecoderConfig(
            vocab_size=teacher.head.vocab_size,
            hidden_size=given.width,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_length=given.window,
        )
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "teacher.lmhead"
        with torch.no_grad():
            states = (teacher.hidden(window[None])[0][0] for window in windows)
            info = distill.save(states, path, head=teacher.head, bits=16)
        print(
            f"{info.bytes:,} bytes, as float32 logits {info.logits_bytes:,}; "
            f"rounding costs at most {info.kl_bound:.1e} nats"
        )
        with distill.TeacherFile(path) as file:
            for step in range(steps):
                number = step % len(windows)
                rows = slice(number * given.window, (number + 1) * given.window)
                hidden = student.hidden(windows[number][None])[0]
                loss = distill.loss(file, rows, student.head(hidden), kind="kl").mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if step % max(1, steps // 10) == 0 or step == steps - 1:
                    print(f"step {step}: KL to the teacher {loss.item():.4f} nats")


if __name__ == "__main__":
    main()
