"""Models of a few thousand numbers for tests of analysis and commands: real files, random weights.

`Letters` cuts text as GPT-2 does, into words with their space, digits and signs, and each of these
into pieces that a small vocabulary has: so a text cut at the wrong place has other ids.
"""

import re
from pathlib import Path

import torch
from llama2c_files import TOKENS, random_weights, vocabulary, write_checkpoint, write_vocabulary

from lmhead.models import LanguageModel, open_model


def write_model(folder: Path, seed: int = 0, *, tokens: list[str] | None = None) -> Path:
    """A llama2.c checkpoint of 300 tokens with its vocabulary; the path of it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_vocabulary(folder / "tok300.bin", vocabulary(TOKENS if tokens is None else tokens))
    return write_checkpoint(folder / "tiny.bin", random_weights(seed))


def tiny(folder: Path, seed: int = 0) -> LanguageModel:
    return open_model(write_model(folder, seed))


class Letters:
    """Bytes, and every pair of letters that follows a space as one piece, similar to BPE."""

    bos_token_id = eos_token_id = None
    _cut = re.compile(r" ?[a-zA-Z]+| ?[0-9]{1,3}| ?[^\sa-zA-Z0-9]+|\s+(?!\S)|\s+")

    def __init__(self, *, bos: bool = False, lower: bool = False) -> None:
        self.bos, self.lower = bos, lower

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        ids = [256] * (self.bos and bos)
        for token in self._cut.findall(text.lower() if self.lower else text):
            data = token.encode()
            # From the left: two bytes at a time where both are small letters, else one.
            while data:
                pair = len(data) > 1 and all(97 <= byte < 123 for byte in data[:2])
                ids.append(257 + (data[0] - 97) * 26 + data[1] - 97 if pair else data[0])
                data = data[2 if pair else 1 :]
        return ids

    def token_bytes(self, id: int) -> bytes:
        if id < 256:
            return bytes([id])
        return b"" if id == 256 else bytes(97 + n for n in divmod(id - 257, 26))

    def bytes_after(self, previous: int | None, id: int) -> bytes:  # noqa: ARG002
        return self.token_bytes(id)

    def decode(self, ids: list[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def __len__(self) -> int:
        return 257 + 26 * 26


def lettered(**options: bool) -> LanguageModel:
    """A model with `Letters` and without a body: for what is done before one is needed."""
    from lmhead import LMHead

    head = LMHead(8, len(Letters())).requires_grad_(False)
    none = torch.nn.Identity()
    return LanguageModel(none, head, tokenizer=Letters(**options))  # type: ignore[arg-type]
