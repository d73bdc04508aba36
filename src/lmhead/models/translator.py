"""`Translator`: a trained encoder and decoder with its vocabulary; text in, text out.

In:  sentences.
Out: per sentence the best translations that beam search finds, with their scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lmhead import checks
from lmhead.errors import ModelError
from lmhead.models.checkpoint import (
    CONFIG,
    MODEL,
    TOKENIZER,
    find_checkpoint,
    load_weights,
    read_about,
)
from lmhead.nn import EncoderDecoder, EncoderDecoderConfig
from lmhead.sampling import beam_search

_TOGETHER = 1024  # places of a batch, beams not counted


@dataclass(frozen=True)
class Translation:
    """One translation.

    Attributes:
        text: without the end.
        score: Σ log p / tokens ** length_penalty.
        ids: its tokens, the end included if it was reached.
    """

    text: str
    score: float
    ids: tuple[int, ...]


class Translator:
    """Translate with an `EncoderDecoder`.

    Args:
        model: the model.
        vocabulary: a `tokenizers.Tokenizer` for both languages.
        begin: the id that begins a translation.
        end: the id that ends sentences of both sides.
        name: for people.

    Example::

        load_translator("run").translate(["I love music."])[0][0].text
    """

    def __init__(
        self, model: EncoderDecoder, vocabulary: Tokenizer, *, begin: int, end: int, name: str = ""
    ) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.begin, self.end, self.name = begin, end, name

    def translate(
        self,
        texts: Iterable[str],
        *,
        num_beams: int = 4,
        n_best: int = 1,
        length_penalty: float = 1.0,
        max_new_tokens: int | None = None,
    ) -> list[list[Translation]]:
        """The best translations of each text, best first; none for a text of white space alone.

        Args:
            texts: sentences, in any number: they are put into batches by their lengths.
            num_beams: see `beam_search`; 1 is greedy.
            n_best: how many to return, at most `num_beams`.
            length_penalty: above 1 favours long translations, below 1 short ones.
            max_new_tokens: the most tokens of a translation; None for the model's `max_length`.
        """
        checks.check_whole("num_beams", num_beams, low=1)
        checks.check_whole("n_best", n_best, low=1, high=num_beams)
        sources = self._encode([text.strip() for text in texts])
        found: list[list[Translation]] = [[] for _ in sources]
        for rows in _batches([len(source) for source in sources]):
            source, mask = pad([sources[row] for row in rows], self.end)
            beams = beam_search(
                self.model.given(source, mask, eos_token_ids=(self.end,)),
                [[self.begin]] * len(rows),
                num_beams=num_beams,
                num_return_sequences=n_best,
                length_penalty=length_penalty,
                max_new_tokens=max_new_tokens or self.model.config.max_length,
            )
            for row, sequences, scores in zip(rows, beams.sequences, beams.scores, strict=True):
                found[row] = [
                    Translation(self.decode(ids), score, tuple(ids))
                    for ids, score in zip(sequences, scores, strict=True)
                ]
        return found

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without the end."""
        return self.vocabulary.decode([id for id in ids if id != self.end]).strip()

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text with its end; [] for an empty one."""
        encoded = self.vocabulary.encode_batch(texts, add_special_tokens=False)
        return [[*one.ids, self.end] if one.ids else [] for one in encoded]


def pad(rows: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor | None]:
    """Ids (B, S) filled up on the right, and the mask (B, S), None where nothing was filled.

    >>> pad([[5, 6], [7]], 0)
    (tensor([[5, 6],
            [7, 0]]), tensor([[ True,  True],
            [ True, False]]))
    """
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])
    if min(map(len, rows)) == longest:
        return ids, None
    lengths = torch.tensor([[len(row)] for row in rows])
    return ids, torch.arange(longest) < lengths


def _batches(lengths: Sequence[int]) -> Iterable[list[int]]:
    """Rows of similar length together; those of length 0 in none."""
    rows: list[int] = []
    for row in sorted((row for row, n in enumerate(lengths) if n), key=lambda row: lengths[row]):
        if rows and (len(rows) + 1) * lengths[row] > _TOGETHER:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def load_translator(where: str | PathLike[str]) -> Translator:
    """Open what `lmhead train --task translate` has made.

    Args:
        where: a checkpoint, or the folder of a run: its best checkpoint.

    Raises:
        ModelError: a file is missing, damaged or of another format; the message names it.

    Example::

        translator = load_translator("run")
        translator.translate(["I love music."])[0][0].text
    """
    folder = find_checkpoint(Path(where))
    about, path = read_about(folder), folder / CONFIG
    if about.get("kind") != "encoder-decoder":
        raise ModelError(
            f"{path}: kind must be 'encoder-decoder', a model that translates; "
            f"got {about.get('kind')!r}"
        )
    try:
        model = EncoderDecoder(EncoderDecoderConfig(**about["model"]))
        begin, end = int(about["bos_token_id"]), int(about["eos_token_ids"][0])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ModelError(f"{path} must describe a model of lmhead: {error!r}") from error
    load_weights(model, folder / MODEL)
    vocabulary = _vocabulary(folder / TOKENIZER, model.config.vocab_size)
    model.requires_grad_(False).eval()
    return Translator(model, vocabulary, begin=begin, end=end, name=Path(where).resolve().name)


def _vocabulary(path: Path, size: int) -> Tokenizer:
    try:
        vocabulary = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # what `tokenizers` raises has no type of its own
        raise ModelError(f"{path} is no vocabulary of the tokenizers library: {error}") from error
    if vocabulary.get_vocab_size() != size:
        raise ModelError(
            f"{path} must have {size} words, as the model has; "
            f"got {vocabulary.get_vocab_size()}: the two do not belong together"
        )
    return vocabulary
