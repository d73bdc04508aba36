"""Open a model from files on this machine: the body gives hidden states, the head is ours.

In:  a path, or a name; nothing is fetched unless that is asked for.
Out: a `LanguageModel`, which `sampling.generate` takes.

The names here are loaded on first use: what only asks which models there are need not load torch.

    bundled             models that have a name
    open                what a path is, and which loader opens it
    model               what is opened: body, head, tokenizer
    folder              the files of a folder, checked before anything opens them
    huggingface         folders of transformers
    huggingface_body    their hidden states, cache and layers
    llama_folder        plain Llamas among them, without transformers
    json_tokenizer      tokenizer.json
    gguf                GGUF files, made folders once and kept in the user's cache
    gguf_file           what is in one
    gguf_tokenizer      its tokenizer
    llama2c             checkpoints of llama2.c
    llama2c_tokenizer   its vocabulary files
    translator          what `lmhead train --task translate` makes
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmhead.models.gguf import load_gguf
    from lmhead.models.huggingface import load_huggingface
    from lmhead.models.json_tokenizer import JsonTokenizer
    from lmhead.models.llama2c import load_llama2c
    from lmhead.models.llama2c_tokenizer import Llama2cTokenizer
    from lmhead.models.model import LanguageModel
    from lmhead.models.open import open_model
    from lmhead.models.translator import Translation, Translator, load_translator

_FILE = {
    "JsonTokenizer": "json_tokenizer",
    "LanguageModel": "model",
    "Llama2cTokenizer": "llama2c_tokenizer",
    "Translation": "translator",
    "Translator": "translator",
    "load_gguf": "gguf",
    "load_huggingface": "huggingface",
    "load_llama2c": "llama2c",
    "load_translator": "translator",
    "open_model": "open",
}

__all__ = [
    "JsonTokenizer",
    "LanguageModel",
    "Llama2cTokenizer",
    "Translation",
    "Translator",
    "load_gguf",
    "load_huggingface",
    "load_llama2c",
    "load_translator",
    "open_model",
]


def __getattr__(name: str) -> Any:
    if name not in _FILE:
        raise AttributeError(f"module 'lmhead.models' has no attribute {name!r}")
    value = getattr(import_module(f"lmhead.models.{_FILE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
