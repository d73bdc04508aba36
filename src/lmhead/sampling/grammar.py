"""Structured output: text that matches a JSON schema, a regular expression or a grammar.

In:  a description of the text; before each token, the tokens generated so far.
Out: a bitmask of the tokens that may come next, for `LazyLogits.mask_tokens` and samplers.

llguidance (extra `grammar`) compiles the description and computes the masks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lmhead.sampling.model import Model

__all__ = ["Grammar", "GrammarMatcher"]

# At most one space between the parts of a JSON text: a model might never stop generating spaces.
_JSON = {"whitespace_flexible": True, "whitespace_pattern": " ?"}
_VOCABULARIES: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class Grammar:
    """A grammar that generated text must match.

    Create it by `json_schema`, `json_object`, `regex`, `choice` or `lark`. The text ends where
    nothing more can follow, or with the model's end-of-text token where the grammar allows an end.

    Raises:
        ModuleNotFoundError: llguidance is not installed.
        ValueError: the description is invalid, or uses features that llguidance does not support.

    Example::

        schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        generate(model, prompt, max_new_tokens=50, grammar=Grammar.json_schema(schema)).text
    """

    def __init__(self, name: str, compiled: str) -> None:
        self.name, self._compiled = name, compiled
        message = _library().LLMatcher.validate_grammar(compiled)
        if message and not message.startswith("WARNING"):
            raise ValueError(f"{name} must be valid: {_one_line(message)}")

    def __repr__(self) -> str:
        return f"Grammar.{self.name}(...)"

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Return the grammar of JSON texts that a schema allows.

        Args:
            schema: a JSON schema, or its text.
        """
        text = schema if isinstance(schema, str) else json.dumps(schema)
        try:
            json.loads(text)
            compiled = _library().LLMatcher.grammar_from_json_schema(text, overrides=_JSON)
        except ValueError as error:
            raise ValueError(f"json_schema must be valid: {_one_line(error)}") from None
        return cls("json_schema", compiled)

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of all JSON objects."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of texts that match a regular expression as a whole."""
        return cls("regex", _library().LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Return the grammar of a few texts."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("choice must have at least one text, none of them empty")
        alternatives = " | ".join(json.dumps(text) for text in texts)
        return cls("choice", _library().LLMatcher.grammar_from_lark(f"start: {alternatives}"))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return a context-free grammar: Lark's notation, or llama.cpp's GBNF with `root ::=`."""
        if "::=" in grammar:
            convert: Any = import_module("llguidance.gbnf_to_lark")
            try:
                grammar = convert.any_to_lark(grammar)
            except Exception as error:  # the converter may raise anything on invalid input
                raise ValueError(f"grammar must be valid: {_one_line(error)}") from None
        return cls("lark", _library().LLMatcher.grammar_from_lark(grammar))

    def matcher(self, model: Model) -> GrammarMatcher:
        """Return a matcher at the beginning of a text of this model."""
        vocabulary = _vocabulary(model)
        matcher = _library().LLMatcher(vocabulary, self._compiled)
        return GrammarMatcher(matcher, self.name, vocabulary.vocab_size)


class GrammarMatcher:
    """State of matching one text: which tokens may come next."""

    def __init__(self, matcher: Any, name: str, vocab: int) -> None:
        self._matcher, self._name, self._entries = matcher, name, -(-vocab // 32)
        self._check()

    def bitmask(self) -> Tensor:
        """Return the tokens that may come next: (W,) int32, a bit per token."""
        mask = torch.zeros(self._entries, dtype=torch.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        self._check()
        return mask

    def accept(self, token: int) -> bool:
        """Advance by a token; return whether the text is complete and nothing may follow."""
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"{self._name}: {_one_line(self._matcher.get_error())}")


def _vocabulary(model: Model) -> Any:
    """Return the llguidance tokenizer of a model; built once per tokenizer."""
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        raise ValueError("grammar needs a model with a tokenizer; this one has none")
    if not model.eos_token_ids:
        raise ValueError("grammar needs a model with an end-of-text token; this one has none")
    if tokenizer not in _VOCABULARIES:
        vocab: int = getattr(model.head, "vocab_size", len(tokenizer))
        library = _library()
        wrapped = library.TokenizerWrapper(_Tokens(tokenizer, vocab, model.eos_token_ids))
        ends = list(model.eos_token_ids)
        _VOCABULARIES[tokenizer] = library.LLTokenizer(wrapped, n_vocab=vocab, eos_token=ends)
    return _VOCABULARIES[tokenizer]


class _Tokens:
    """Adapter of a tokenizer for llguidance."""

    def __init__(self, tokenizer: Any, vocab: int, ends: Sequence[int]) -> None:
        self._encode = tokenizer.encode
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = ends[0]
        known = range(min(len(tokenizer), vocab))
        self.tokens = [tokenizer.token_bytes(id) for id in known] + [b""] * (vocab - len(known))
        self.special_token_ids = [id for id, text in enumerate(self.tokens) if not text]
        self._ids = {text: id for id, text in enumerate(self.tokens) if text}
        self._longest_token = max(map(len, self._ids), default=1)
        for id in self.special_token_ids:  # special tokens need bytes that no valid text contains
            self.tokens[id] = b"\xff<%d>" % id

    def __call__(self, text: str) -> list[int]:
        """Return tokens that spell the text exactly; some tokenizers put a space before it."""
        text_bytes = text.encode("utf-8")
        ids: list[int] = self._encode(text, bos=False)
        if b"".join(self.tokens[id] for id in ids) == text_bytes:
            return ids
        return list(self._greedy_tokens(text_bytes))

    def _greedy_tokens(self, text: bytes) -> Iterator[int]:
        """Yield tokens of the text, each the longest that matches."""
        while text:
            size = next(
                (
                    n
                    for n in range(min(len(text), self._longest_token), 0, -1)
                    if text[:n] in self._ids
                ),
                0,
            )
            if size:
                yield self._ids[text[:size]]
            text = text[max(size, 1) :]


def _library() -> Any:
    if find_spec("llguidance") is None:
        raise ModuleNotFoundError(
            "structured output needs llguidance: pip install 'lmhead[grammar]'", name="llguidance"
        )
    return import_module("llguidance")


def _one_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:300]
