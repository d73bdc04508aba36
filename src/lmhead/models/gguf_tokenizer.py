"""The tokenizer inside a GGUF file, as a `tokenizers.Tokenizer`.

Two kinds are supported: "gpt2", byte-level BPE with a named rule for splitting text before merging;
and "llama", sentencepiece tokens with scores.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from lmhead.errors import ModelError
from lmhead.models.model_files import Fields, reject_panics

_UNKNOWN, _CONTROL, _ADDED = 2, 3, 4  # of `token_type`
_MAX_LENGTH = 512  # characters of a sentencepiece token: merging takes quadratic time

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}"
# Rules with which a text that is a token is not split, even if no merges lead to it.
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2")
# How text is split before merging, by llama.cpp's name of the rule: a pattern, or True if digits
# are split off before GPT-2's own rule.
SPLITS: dict[str, str | bool] = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo", "mpt"), False),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), True),
    **dict.fromkeys(("codeshell", "exaone", "minerva-7b"), True),
    **dict.fromkeys((*_IGNORE_MERGES, "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), _QWEN2),
}


def make_tokenizer(metadata: Fields) -> Tokenizer:
    """Return the tokenizer that a GGUF file describes."""
    kind = metadata.text("tokenizer.ggml.model", "")
    tokens: list[str] = metadata.list_of(str, "tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{metadata.path} holds no tokenizer: take a file with one")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"{metadata.path}: tokenizer.ggml.model must be gpt2 or llama; got {kind!r}. Open the "
            "model's Hugging Face folder instead"
        )
    types = metadata.values.get("tokenizer.ggml.token_type") and metadata.list_of(
        int, "tokenizer.ggml.token_type", len(tokens)
    )
    added = [
        AddedToken(token, special=type in (_UNKNOWN, _CONTROL), normalized=False)
        for token, type in zip(tokens, types or (), strict=False)
        if type in (_UNKNOWN, _CONTROL, _ADDED)
    ]
    with reject_panics(f"{metadata.path}: tokenizer.ggml must describe a tokenizer"):
        make = _byte_level if kind == "gpt2" else _sentencepiece
        tokenizer = make(metadata, tokens)
        tokenizer.add_tokens([token for token in added if not token.special])
        tokenizer.add_special_tokens([token for token in added if token.special])
        bos = special_ids(metadata).get("bos_token_id")
        if bos is not None and metadata.flag("tokenizer.ggml.add_bos_token", kind == "llama"):
            token = tokens[bos]
            tokenizer.post_processor = TemplateProcessing(f"{token} $A", None, [(token, bos)])
    result: Tokenizer = tokenizer
    return result


def special_ids(metadata: Fields) -> dict[str, int]:
    """Return the ids that begin and end a text, by their names in config.json."""
    high = len(metadata.list_of(str, "tokenizer.ggml.tokens")) - 1
    return {
        name: metadata.integer(f"tokenizer.ggml.{name}", high=high)
        for name in ("bos_token_id", "eos_token_id")
        if f"tokenizer.ggml.{name}" in metadata
    }


def _byte_level(metadata: Fields, tokens: list[str]) -> Any:
    pairs = metadata.list_of(str, "tokenizer.ggml.merges")
    merges = [tuple(pair.split(" ", 1)) for pair in pairs]
    if not all(len(merge) == 2 for merge in merges):
        raise metadata.error("tokenizer.ggml.merges", "pairs of tokens with a space between")
    rule = metadata.text("tokenizer.ggml.pre", "default")
    if rule not in SPLITS:
        raise ModelError(
            f"{metadata.path}: tokenizer.ggml.pre must be one of {', '.join(SPLITS)}; got "
            f"{rule!r}. Open the model's Hugging Face folder instead"
        )
    vocab = {token: id for id, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(
        BPE(vocab=vocab, merges=merges, ignore_merges=rule in _IGNORE_MERGES)
    )
    split = SPLITS[rule]
    steps: list[Any] = []
    if isinstance(split, str):
        steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    elif split:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not isinstance(split, str))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Fields, tokens: list[str]) -> Any:
    longest = max(tokens, key=len)
    if len(longest) > _MAX_LENGTH:
        raise ModelError(
            f"{metadata.path}: tokenizer.ggml.tokens must have at most {_MAX_LENGTH} characters "
            f"each; got one of {len(longest):,}"
        )
    vocab = {token: id for id, token in enumerate(tokens)}
    scores = [0.0] * len(tokens)
    if "tokenizer.ggml.scores" in metadata:
        scores = metadata.list_of(float, "tokenizer.ggml.scores", len(tokens))
    # Two tokens merge into the token with the best score: each way to split a token is a merge.
    merges = sorted(
        (-scores[id], vocab[token[:split]], vocab[token[split:]], token[:split], token[split:])
        for token, id in vocab.items()
        for split in range(1, len(token))
        if token[:split] in vocab and token[split:] in vocab
    )
    unknown = metadata.integer("tokenizer.ggml.unknown_token_id", 0, high=len(tokens) - 1)
    tokenizer: Any = Tokenizer(
        BPE(
            vocab=vocab,
            merges=[merge[3:] for merge in merges],
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    prepend: list[Any] = [normalizers.Prepend("▁")] if space else []
    strip: list[Any] = [decoders.Strip(" ", 1, 0)] if space else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
