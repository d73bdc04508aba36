"""`Translator`: a trained encoder and decoder with its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lmhead import checks
from lmhead.models import checkpoint
from lmhead.models.checkpoint import CONFIG, MODEL, TOKENIZER
from lmhead.models.huggingface_translator import HuggingFaceEncoderDecoder, load_encoder_decoder
from lmhead.models.json_tokenizer import max_token_id, read_tokenizer
from lmhead.models.model_files import StrPath, exists
from lmhead.nn import EncoderDecoder, EncoderDecoderConfig
from lmhead.sampling import beam_search

_BATCH_TOKENS = 1024  # positions of a batch, beams not counted


@dataclass(frozen=True)
class Translation:
    """One translation."""

    text: str  # without the end token
    score: float  # Σ log p / tokens ** length_penalty
    ids: tuple[int, ...]  # its token ids, with the end token if it was reached


class Translator:
    """Translate with an `EncoderDecoder`, a tokenizer for both languages, and the ids of its ends.

    `prompt` are the ids that begin a translation, if there are more than `begin`. With `template`
    the tokenizer adds the special tokens to a sentence, as those of Hugging Face do; if not, `end`
    is appended.

    Example::

        load_translator("run").translate(["I love music."])[0][0].text
    """

    def __init__(
        self,
        model: EncoderDecoder | HuggingFaceEncoderDecoder,
        vocabulary: Tokenizer,
        *,
        begin: int,
        end: int,
        name: str = "",
        prompt: Sequence[int] | None = None,
        template: bool = False,
    ) -> None:
        self._prompt, self._template = list(prompt or [begin]), template
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
        """Return the `n_best` translations of each text, best first; [] for white space alone.

        Sentences are batched by length. The other options are those of `beam_search`; without
        `max_new_tokens` the model's `max_length` is the limit.
        """
        checks.check_integer("num_beams", num_beams, low=1)
        checks.check_integer("n_best", n_best, low=1, high=num_beams)
        sources = self._encode([text.strip() for text in texts])
        translations: list[list[Translation]] = [[] for _ in sources]
        for rows in _batches([len(source) for source in sources]):
            source, mask = pad([sources[row] for row in rows], self.end)
            beams = beam_search(
                self.model.given(source, mask, eos_token_ids=(self.end,)),
                [self._prompt] * len(rows),
                num_beams=num_beams,
                num_return_sequences=n_best,
                length_penalty=length_penalty,
                max_new_tokens=max_new_tokens or self.model.config.max_length,
            )
            for row, sequences, scores in zip(rows, beams.sequences, beams.scores, strict=True):
                translations[row] = [
                    Translation(self.decode(ids), score, tuple(ids))
                    for ids, score in zip(sequences, scores, strict=True)
                ]
        return translations

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without the end token."""
        return self.vocabulary.decode([id for id in ids if id != self.end]).strip()

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text with the end token; [] for an empty one."""
        encoded = self.vocabulary.encode_batch(texts, add_special_tokens=self._template)
        kept = [encoding.ids if text else [] for encoding, text in zip(encoded, texts, strict=True)]
        return [[*ids, self.end] if ids and ids[-1] != self.end else ids for ids in kept]


def _load_huggingface(folder: Path) -> Translator:
    model, prompt, end = load_encoder_decoder(folder)
    vocabulary = _read_vocabulary(folder, model.config.vocab_size, padded=True)
    ends: dict[str, Any] = {"begin": prompt[0], "end": end, "prompt": prompt, "template": True}
    return Translator(model, vocabulary, name=folder.resolve().name, **ends)


def _read_vocabulary(folder: Path, vocab_size: int, *, padded: bool) -> Tokenizer:
    """Return the tokenizer, checked against the model, which may be `padded` with unused ids."""
    vocabulary: Tokenizer = read_tokenizer(folder / TOKENIZER)
    size = vocab_size if padded else vocabulary.get_vocab_size()
    max_id = max_token_id(vocabulary, folder / TOKENIZER)
    checkpoint.check_vocabulary(folder / TOKENIZER, size, max_id, vocab_size)
    return vocabulary


def pad(rows: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor | None]:
    """Return ids (B, S) padded on the right, and the mask (B, S), None if nothing was padded.

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
    """Yield batches of rows of similar length, without rows of length 0."""
    rows: list[int] = []
    for row in sorted((row for row, n in enumerate(lengths) if n), key=lambda row: lengths[row]):
        if rows and (len(rows) + 1) * lengths[row] > _BATCH_TOKENS:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def load_translator(where: StrPath) -> Translator:
    """Open a checkpoint of `lmhead train --task translate`, or a Hugging Face folder.

    `where` is a checkpoint; the folder of a run: its best checkpoint; or the folder of an encoder
    and decoder that transformers can build (T5, BART, Marian, ...), with tokenizer.json.

    Example::

        translator = load_translator("run")
        translator.translate(["I love music."])[0][0].text
    """
    folder = Path(where)
    if exists(folder / CONFIG) and not checkpoint.is_checkpoint(folder):
        return _load_huggingface(folder)
    folder = checkpoint.find_checkpoint(folder)
    about = checkpoint.read_about(folder)
    if about.text("kind", "") != "encoder-decoder":
        raise about.error("kind", "'encoder-decoder', a model that translates")
    sizes = checkpoint.read_model_config(about, EncoderDecoderConfig)
    begin = about.integer("bos_token_id", high=sizes.vocab_size - 1)
    ends = checkpoint.read_eos_token_ids(about, sizes.vocab_size)
    if not ends:
        raise about.error("eos_token_ids", "a list of at least one token id")
    model = EncoderDecoder(sizes)
    checkpoint.load_weights(model, folder / MODEL)
    vocabulary = _read_vocabulary(folder, sizes.vocab_size, padded=False)
    model.requires_grad_(False).eval()
    return Translator(model, vocabulary, begin=begin, end=ends[0], name=Path(where).resolve().name)
