"""Hugging Face folders: `config.json`, safetensors, `tokenizer.json`.

A plain Llama is opened by `llama_folder`, all other models by transformers. Nothing is downloaded,
no pickle is read, no code that comes with a model is run. What a model does to its logits (a scale,
soft-capping) is read from the configuration; then the model processes one token, and the logits of
head and model must agree. A model that does something else to them is refused.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.errors import ModelError, PerformanceWarning
from lmhead.head import LMHead
from lmhead.models import llama_folder
from lmhead.models.chat import read_chat
from lmhead.models.folder import read_config, read_special_tokens, read_weights
from lmhead.models.huggingface_body import HuggingFaceBody, LayerStack, find_layers
from lmhead.models.json_tokenizer import JsonTokenizer
from lmhead.models.language_model import LanguageModel
from lmhead.models.model_files import Fields, TensorHeader, check_numbers, file_size, one_line
from lmhead.progress import report_read
from lmhead.sampling.model import Body

# Largest difference of head and model on one token, relative to the largest logit.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_HALF = 5e-2
CAUSAL = "AutoModelForCausalLM"
_NOT_CAUSAL = ("xlnet",)  # attends to later tokens, although transformers lists it as causal
_MAX_BUFFER = 2**28  # elements of what a model computes from its configuration, e.g. causal masks


def load_huggingface(
    folder: str | os.PathLike[str], *, name: str | None = None, direct: bool = True
) -> LanguageModel:
    """Open a folder in the format of Hugging Face's transformers.

    The weights keep the dtype of the file and do not require gradients. `direct` opens a plain
    Llama without transformers, which is faster.

    Example::

        model = load_huggingface("SmolLM2-135M")
        generate(model, "The capital of France is", max_new_tokens=5).text
    """
    folder = Path(folder)
    config = read_config(folder)
    kind = config.text("model_type", "")
    tensors = read_weights(folder)
    bos, ends = read_special_tokens(folder, config)
    tokenizer_file = folder / "tokenizer.json"
    tokenizer = JsonTokenizer(tokenizer_file, bos_token_id=bos, eos_token_id=next(iter(ends), None))
    chat = read_chat(folder, tokenizer)
    body: Body
    if direct and kind == "llama" and llama_folder.is_plain(config):
        body, head = llama_folder.load(folder, config, tensors)
        max_length: int | None = config.integer("max_position_embeddings", 2048, low=1)
    else:
        body, head, max_length = _through_transformers(folder, config, tensors)
    if tokenizer.max_id >= head.vocab_size:
        raise ModelError(
            f"{tokenizer_file} must have token ids below {head.vocab_size}, the vocabulary of the "
            f"model in {folder}; got {tokenizer.max_id}: they do not belong together. Copy the "
            "tokenizer from the source of the model"
        )
    return LanguageModel(
        body,
        head,
        eos_token_ids=ends,
        tokenizer=tokenizer,
        max_length=max_length,
        name=name or folder.resolve().name,
        chat=chat,
    )


def transformers() -> Any:
    """Return the library, or raise a `ModelError` that says how to install it."""
    if find_spec("transformers") is None:
        raise ModelError(
            "Hugging Face models are opened through transformers, which is not installed: "
            "pip install 'lmhead[models]'"
        )
    return import_module("transformers")


@contextmanager
def quiet_transformers(what: str, advice: str = "") -> Iterator[None]:
    """Disable connections, progress bars and logs of transformers; turn errors into `ModelError`.

    `what` is opened: transformers may raise anything on damaged files.
    """
    library = transformers()
    constants: Any = import_module("huggingface_hub.constants")
    logging = library.utils.logging
    before = constants.HF_HUB_OFFLINE, logging.get_verbosity(), logging.is_progress_bar_enabled()
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: os.environ.get(name) for name in names}
    constants.HF_HUB_OFFLINE = True
    os.environ.update(dict.fromkeys(names, "1"))
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"transformers cannot open {what}: {one_line(error)}{advice}") from error
    finally:
        constants.HF_HUB_OFFLINE = before[0]
        logging.set_verbosity(before[1])
        if before[2]:
            logging.enable_progress_bar()
        for variable, value in environment.items():
            if value is None:
                del os.environ[variable]
            else:
                os.environ[variable] = value


def _through_transformers(
    folder: Path, config: Fields, tensors: Mapping[str, TensorHeader]
) -> tuple[HuggingFaceBody, LMHead, int | None]:
    """Return body, head and maximum length of a model that transformers opens."""
    check_architecture(config)
    advice = ". Its config.json and its weights may not belong together: download the folder again"
    with quiet_transformers(str(folder), advice):
        model = load_model(folder, config, tensors)
        base, head = _split(model, folder)
        body = HuggingFaceBody(base, _compare(model, base, head, folder))
        length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return body, head, length if isinstance(length, int) else None


def check_architecture(config: Fields, auto: str = CAUSAL) -> None:
    """Validate that transformers knows the architecture, as a class of `auto`, not quantized."""
    library = transformers()
    kind = config.text("model_type", "")
    if kind not in library.CONFIG_MAPPING:
        own_code = ", which needs the code that comes with the model, and lmhead never runs that"
        own_code = own_code if "auto_map" in config else ""
        raise ModelError(
            f"{config.path}: model_type must be an architecture that transformers "
            f"{library.__version__} knows; got {kind!r}"
            f"{own_code}. A newer transformers may know it, or there may be a GGUF file of the "
            "model"
        )
    names = library.models.auto.modeling_auto
    causal = kind in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    causal = causal and kind not in _NOT_CAUSAL and not config.flag("is_encoder_decoder", False)
    both = kind in names.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    if auto == CAUSAL and not causal:
        hint = "; an encoder and decoder, which `lmhead translate` opens" if both else ""
        raise ModelError(
            f"{config.path}: model_type must be a causal language model, a decoder such as Llama "
            f"or GPT-2; got {kind!r}{hint}"
        )
    if auto != CAUSAL and not both:
        raise ModelError(
            f"{config.path}: model_type must be an encoder and decoder such as T5, BART or Marian; "
            f"got {kind!r}"
        )
    if "quantization_config" in config:
        method = config.object("quantization_config").text("quant_method", "unknown")
        raise ModelError(
            f"{config.path}: quantization_config must be absent; got quantized weights "
            f"({method}). lmhead opens float weights, or GGUF files: take one of these"
        )


def check_size(path: Path, config: Any, stored: int, auto: str = CAUSAL) -> None:
    """Validate that a configuration of transformers does not describe more numbers than are stored.

    The model is built on the meta device, where nothing is allocated.
    """
    with torch.device("meta"):
        model = getattr(transformers(), auto).from_config(config, trust_remote_code=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    buffers = sum(buffer.numel() for buffer in model.buffers())
    if parameters > 2 * stored + 2**20 or buffers > _MAX_BUFFER:
        raise ModelError(
            f"{path} describes a model of {parameters + buffers:,} numbers, but its files hold "
            f"{stored:,}: they have other shapes than its config.json says"
        )


def load_model(
    folder: Path, config: Fields, tensors: Mapping[str, TensorHeader], auto: str = CAUSAL
) -> Any:
    """Return the model of transformers, with every weight from the files."""
    library = transformers()
    check_numbers(config, len(tensors))
    described = library.AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    check_size(config.path, described, sum(tensor.size for tensor in tensors.values()), auto)
    sizes = [file_size(path) for path in folder.glob("*.safetensors")]
    report_read(f"{folder.resolve().name} with transformers", 0, sum(sizes))
    model, report = getattr(library, auto).from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype="auto",
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report, and an error below
    )
    wrong = sorted(str(key[0]) for key in report["mismatched_keys"])
    if wrong:
        raise ModelError(
            f"the weights in {folder} have other shapes than its config.json says: "
            f"{_first(wrong)}. Download both from one source again"
        )
    if report["missing_keys"]:
        raise ModelError(
            f"the weights in {folder} are not complete: {_first(sorted(report['missing_keys']))} "
            "missing. Download the safetensors files again"
        )
    for parameter in model.parameters():
        parameter.data = llama_folder.aligned(parameter.data)
    model.requires_grad_(False).eval()
    return model


def output_layer(model: Any, folder: Path) -> nn.Linear:
    """Return the linear layer that a model ends in."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ModelError(
            f"the model in {folder} must end in a linear layer; {type(model).__name__} ends in "
            f"{type(linear).__name__}"
        )
    return linear


def _split(model: Any, folder: Path) -> tuple[nn.Module, LMHead]:
    """Return the inner model, and our head on the weight of the outer one."""
    linear = output_layer(model, folder)
    base = model.get_decoder()
    if base is model:
        base = model.base_model
    if base is model and isinstance(getattr(model, "model", None), nn.Module):
        base = model.model  # Llama 4, whose base_model_prefix is that of the multimodal model
    softcap, scale = read_softcap_and_scale(model.config)
    return base, LMHead.from_linear(linear, softcap=softcap, scale=scale)


def read_softcap_and_scale(config: Any) -> tuple[float | None, float]:
    """Return the softcap and scale that a model applies to its logits.

    Gemma: final_logit_softcapping. Cohere: · logit_scale. Granite and MiniCPM: / logits_scaling.
    Falcon H1: · lm_head_multiplier.
    """
    text = config.get_text_config()

    def number(name: str) -> float | None:
        value = getattr(text, name, None)
        return float(value) if value else None

    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= number(name) or 1.0
    scale /= number("logits_scaling") or 1.0
    return number("final_logit_softcapping"), scale


@torch.no_grad()
def _compare(model: Any, base: nn.Module, head: LMHead, folder: Path) -> LayerStack | None:
    """Validate that head and model agree on the logits of one token; return the model's layers."""
    ids = torch.tensor([[min(head.vocab_size - 1, 7)]])
    outputs: list[Any] = []

    def record(module: nn.Module, args: Any, out: Any) -> None:  # noqa: ARG001
        outputs.append(out)

    hook = base.register_forward_hook(record)
    try:
        theirs = model(input_ids=ids, use_cache=True).logits[0, -1]
    finally:
        hook.remove()
    takes_cache = "past_key_values" in inspect.signature(base.forward).parameters
    if takes_cache and not hasattr(outputs[-1], "past_key_values"):
        raise ModelError(
            f"{type(model).__name__} in {folder} must return the cache that it is asked for; it "
            "keeps the state of one sequence in its modules, and sequences would mix. Use "
            "transformers.generate for it"
        )
    if not bool(theirs.isfinite().all()):
        raise ModelError(f"the weights in {folder} must give finite logits; got NaN or infinity")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # one row
        ours = head(outputs[-1].last_hidden_state[0, -1]).materialize()
    if not close_logits(ours, theirs):
        raise ModelError(
            f"the head of {type(model).__name__} in {folder} must be a linear layer with bias, "
            "scale and soft-capping; it does more, and lmhead would not give its logits. "
            "Compute the input of its last linear layer with transformers and give it to "
            "lmhead.query"
        )
    return find_layers(base, lambda: base(input_ids=ids, use_cache=False, return_dict=True))


def close_logits(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two rows of logits agree, up to the rounding of their dtype."""
    limit = _TOLERANCE.get(ours.dtype, _TOLERANCE_HALF) * float(theirs.abs().max())
    return ours.shape == theirs.shape and bool(((ours - theirs).abs() <= limit).all())


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
