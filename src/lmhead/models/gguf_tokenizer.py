"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer`.

In:  the entries `tokenizer.ggml.*` of the file.
Out: what `tokenizer.json` would hold.

Two kinds are common: "gpt2", merges on bytes written as letters, with a rule of its own for where a
text is cut before merging; and "llama", pieces with scores in the manner of sentencepiece.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from lmhead.errors import ModelError

_UNKNOWN, _CONTROL, _ADDED = 2, 3, 4  # of `token_type`

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Where a text is cut before merging, by the name that llama.cpp gives the rule: a pattern, or
# whether digits stand alone before GPT-2's own rule.
_CUTS: dict[str, str | bool] = {
    "default": False,
    "gpt-2": False,
    "smollm": True,
    "starcoder": True,
    "refact": True,
    "command-r": True,
    "llama-bpe": rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}",
}


def make_tokenizer(entries: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Raises:
        ModelError: it is of a kind that is not known here, or parts of it are missing.
    """
    kind = entries.get("tokenizer.ggml.model")
    tokens: list[str] | None = entries.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{path} holds no tokenizer: take a file with one")
    if kind == "gpt2":
        tokenizer = _byte_level(entries, tokens, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(entries, tokens)
    else:
        raise ModelError(
            f"{path} has a tokenizer of the kind {kind!r}; lmhead knows 'gpt2' and 'llama'. Open "
            "the model's folder in the format of Hugging Face instead"
        )
    types = entries.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    added = [
        AddedToken(token, special=type in (_UNKNOWN, _CONTROL), normalized=False)
        for token, type in zip(tokens, types, strict=True)
        if type in (_UNKNOWN, _CONTROL, _ADDED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    bos = entries.get("tokenizer.ggml.bos_token_id")
    if bos is not None and entries.get("tokenizer.ggml.add_bos_token", kind == "llama"):
        mark = tokens[bos]
        tokenizer.post_processor = TemplateProcessing(f"{mark} $A", None, [(mark, bos)])
    made: Tokenizer = tokenizer
    return made


def _byte_level(entries: dict[str, Any], tokens: list[str], path: Path) -> Any:
    merges = [tuple(pair.split(" ", 1)) for pair in entries.get("tokenizer.ggml.merges") or []]
    rule = entries.get("tokenizer.ggml.pre", "default")
    if rule not in _CUTS:
        raise ModelError(
            f"{path} cuts texts by the rule {rule!r}, which is not known here "
            f"({', '.join(_CUTS)} are). Open the model's folder in the format of Hugging Face"
        )
    vocab = {token: id for id, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=rule == "llama-bpe"))
    cut = _CUTS[rule]
    steps: list[Any] = []
    if isinstance(cut, str):
        steps.append(pre_tokenizers.Split(Regex(cut), "isolated"))
    elif cut:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not isinstance(cut, str))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(entries: dict[str, Any], tokens: list[str]) -> Any:
    vocab = {token: id for id, token in enumerate(tokens)}
    scores = entries.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    # Pieces join to the piece with the best score: every way to make one is a merge, best first.
    merges = sorted(
        (-scores[id], vocab[token[:at]], vocab[token[at:]], token[:at], token[at:])
        for token, id in vocab.items()
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    )
    unknown = tokens[entries.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer: Any = Tokenizer(
        BPE(
            vocab=vocab,
            merges=[merge[3:] for merge in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = bool(entries.get("tokenizer.ggml.add_space_prefix", True))
    prepend: list[Any] = [normalizers.Prepend("▁")] if space else []
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
