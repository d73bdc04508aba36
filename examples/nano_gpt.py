"""Train a small GPT on the characters of a text, in one file: a training loop to start from.

The model is made of torch's own layers. Its output layer is an `LMHead`, tied to the embedding: the
loss is torch's cross-entropy on lazy logits, and no logits tensor is built.

    python examples/nano_gpt.py book.txt
    python examples/nano_gpt.py --quick          # ten steps, seconds
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lmhead

TEXT = "To be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. " * 60


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Token ids (B, T) to lazy logits (B, T, V)."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head = lmhead.LMHead.tied(self.tokens)  # instead of nn.Linear

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    """Read the arguments, train, generate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", type=Path, help="UTF-8 [default: one sentence]")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rows", type=int, default=12, help="rows per batch")
    parser.add_argument("--length", type=int, default=64, help="characters per row")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--quick", action="store_true", help="ten steps of a smaller model")
    given = parser.parse_args()
    if given.quick:
        given.steps, given.width, given.layers = 10, 32, 2

    text = TEXT if given.text is None else given.text.read_text(encoding="utf-8")
    letters = sorted(set(text))
    data = torch.tensor([letters.index(letter) for letter in text])
    if len(data) <= given.length + 1:
        parser.error(f"the text must have more than {given.length + 1} characters")
    torch.manual_seed(0)
    model = GPT(len(letters), given.width, given.layers, given.heads, given.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.learning_rate, weight_decay=0.1)

    for step in range(given.steps):
        warm, done = min(1.0, (step + 1) / 20), step / given.steps
        optimizer.param_groups[0]["lr"] = (
            given.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * done))
        )
        starts = torch.randint(len(data) - given.length - 1, (given.rows,))
        batch = torch.stack([data[i : i + given.length + 1] for i in starts.tolist()])
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, given.steps // 10) == 0 or step == given.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")

    sampler = lmhead.Sampler(temperature=0.8, top_k=20, seed=1)
    ids = data[:1]
    model.eval()
    with torch.no_grad():
        for _ in range(20 if given.quick else 200):
            logits = model(ids[None, -given.length :])[:, -1]
            ids = torch.cat([ids, sampler(logits, ids[None], len(ids)).token])
    print("".join(letters[i] for i in ids.tolist()))


if __name__ == "__main__":
    main()
