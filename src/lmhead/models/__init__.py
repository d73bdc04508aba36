"""Open models from local files as a body that returns hidden states and an `LMHead`.

Nothing is downloaded unless asked for. Names are imported on first use: listing models loads no
torch.

    bundled             models that have a name
    open                detect the format of a path and open it
    language_model      `LanguageModel`: body, head, tokenizer
    model_files         read files that may be damaged or hostile
    folder              validate the files of a Hugging Face folder
    huggingface         Hugging Face folders
    huggingface_body    hidden states, cache and layers of a transformers model
    llama_folder        Llama folders, without transformers
    rotary              rope_scaling of Llama configurations
    json_tokenizer      tokenizer.json
    chat                chat templates
    chat_worker         render them in a process with limits
    gguf                GGUF files, converted once to a folder in the user's cache
    gguf_file           the GGUF format
    gguf_llama          Llama models in GGUF files
    gguf_tokenizer      tokenizers in GGUF files
    llama_cpp           llama.cpp as the engine of a body
    llama2c             llama2.c checkpoints
    llama2c_tokenizer   llama2.c vocabularies
    checkpoint          checkpoints of `lmhead train`
    translator          checkpoints of `lmhead train --task translate`; encoder-decoder folders of
                        transformers (huggingface_translator)
"""

from typing import TYPE_CHECKING

from lmhead.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lmhead.models.gguf import load_gguf as load_gguf
    from lmhead.models.huggingface import load_huggingface as load_huggingface
    from lmhead.models.json_tokenizer import JsonTokenizer as JsonTokenizer
    from lmhead.models.language_model import LanguageModel as LanguageModel
    from lmhead.models.llama2c import load_llama2c as load_llama2c
    from lmhead.models.llama2c_tokenizer import Llama2cTokenizer as Llama2cTokenizer
    from lmhead.models.open import open_model as open_model
    from lmhead.models.translator import Translation as Translation
    from lmhead.models.translator import Translator as Translator
    from lmhead.models.translator import load_translator as load_translator

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "lmhead.models.gguf": ["load_gguf"],
        "lmhead.models.huggingface": ["load_huggingface"],
        "lmhead.models.json_tokenizer": ["JsonTokenizer"],
        "lmhead.models.language_model": ["LanguageModel"],
        "lmhead.models.llama2c": ["load_llama2c"],
        "lmhead.models.llama2c_tokenizer": ["Llama2cTokenizer"],
        "lmhead.models.open": ["open_model"],
        "lmhead.models.translator": ["Translation", "Translator", "load_translator"],
    },
)
