"""Hugging Face folders: `config.json`, safetensors, `tokenizer.json`.

A plain Llama is ours to compute (`llama_folder`); all others go through transformers.

In:  a folder.
Out: a `LanguageModel` whose head stands on the model's own weight.

Nothing is fetched, no pickle is read, no code that comes with a model is run. What models do to
their logits (a scale, soft-capping) is read from the configuration; then the model reads one token,
and head and model must agree on its logits. A family that does something else is refused rather
than answered for wrongly.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lmhead.errors import ModelError, PerformanceWarning
from lmhead.head import LMHead
from lmhead.models import folder as files
from lmhead.models import llama_folder
from lmhead.models.chat import read_chat
from lmhead.models.huggingface_body import Frame, HuggingFaceBody, find_frame
from lmhead.models.json_tokenizer import JsonTokenizer
from lmhead.models.model import LanguageModel
from lmhead.sampling.model import Body

# How far head and model may be apart on one token, as a share of the largest logit.
_AGREE = {torch.float64: 1e-6, torch.float32: 1e-3}
_AGREE_HALF = 5e-2


def load_huggingface(
    folder: str | os.PathLike[str], *, name: str | None = None, direct: bool = True
) -> LanguageModel:
    """Open a folder in the format of Hugging Face's transformers.

    The weights keep the type of the file and do not ask for gradients.

    Args:
        folder: with `config.json`, `model.safetensors` (or shards and their index) and
            `tokenizer.json`.
        name: what to call it; None for the name of the folder.
        direct: whether a plain Llama is opened without transformers, which is quicker.

    Raises:
        ModelError: a file is missing, damaged or of another model; transformers is not installed
            or does not know the architecture; it is no causal language model.

    Example::

        model = load_huggingface("SmolLM2-135M")
        generate(model, "The capital of France is", max_new_tokens=5).text
    """
    folder = Path(folder)
    config = files.read_json(folder / "config.json")
    weights = files.check_weights(folder)
    tokenizer_file = folder / "tokenizer.json"
    marks = files.read_marks(folder, config)
    tokenizer = JsonTokenizer(
        tokenizer_file, bos_token_id=marks.bos, eos_token_id=next(iter(marks.eos), None)
    )
    body: Body
    if direct and llama_folder.is_plain(config):
        body, head = llama_folder.load(folder, config, weights)
        max_length = config.get("max_position_embeddings", 2048)
    else:
        model = _load(folder, config)
        base, head = _cut(model, folder)
        body = HuggingFaceBody(base, _agree(model, base, head, folder))
        max_length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if len(tokenizer) > head.vocab_size:
        raise ModelError(
            f"{tokenizer_file} has {len(tokenizer)} tokens, but the model in {folder} only "
            f"{head.vocab_size} words: they do not belong together. Copy the tokenizer from where "
            "the model comes from"
        )
    return LanguageModel(
        body,
        head,
        eos_token_ids=marks.eos,
        tokenizer=tokenizer,
        max_length=max_length,
        name=name or folder.resolve().name,
        chat=read_chat(folder, tokenizer),
    )


def transformers() -> Any:
    """The library, or a `ModelError` that says how to install it."""
    if find_spec("transformers") is None:
        raise ModelError(
            "Hugging Face models are opened through transformers, which is not installed: "
            "pip install 'lmhead[hf]'"
        )
    return import_module("transformers")


@contextmanager
def offline_and_quiet() -> Iterator[None]:
    """No connection, no progress bars and no remarks of transformers, inside."""
    library = transformers()
    constants: Any = import_module("huggingface_hub.constants")
    logging = library.utils.logging
    before = constants.HF_HUB_OFFLINE, logging.get_verbosity(), logging.is_progress_bar_enabled()
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: os.environ.get(name) for name in names}
    constants.HF_HUB_OFFLINE = True
    os.environ.update(dict.fromkeys(names, "1"))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
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


def _load(folder: Path, config: dict[str, Any]) -> Any:
    """The whole model of transformers, with every weight from the files."""
    library = transformers()
    _check_kind(folder, config, library)
    try:
        with offline_and_quiet():
            model, report = library.AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype="auto",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report, and an error below
            )
    except Exception as error:  # whatever transformers makes of a damaged folder
        raise ModelError(
            f"transformers cannot open {folder}: {in_short(error)}. Its config.json and its "
            "weights may not belong together: fetch the folder again"
        ) from error
    wrong = sorted(str(key[0]) for key in report["mismatched_keys"])
    if wrong:
        raise ModelError(
            f"the weights in {folder} have other shapes than its config.json says: "
            f"{_some(wrong)}. Fetch both from one place again"
        )
    if report["missing_keys"]:
        raise ModelError(
            f"the weights in {folder} are not complete: {_some(sorted(report['missing_keys']))} "
            "missing. Fetch the safetensors files again"
        )
    model.requires_grad_(False).eval()
    return model


def _check_kind(folder: Path, config: dict[str, Any], library: Any) -> None:
    """A causal language model, not quantized, whose architecture transformers has itself."""
    where = folder / "config.json"
    kind = config.get("model_type")
    if kind not in library.CONFIG_MAPPING:
        raise ModelError(
            f"{where} names the architecture {kind!r}, which transformers "
            f"{library.__version__} does not have"
            + (
                "; the code that comes with the model would be needed, and lmhead never runs that. "
                if "auto_map" in config
                else ". "
            )
            + "A newer transformers may have it, or there may be a GGUF file of the model"
        )
    causal = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if kind not in causal or config.get("is_encoder_decoder"):
        raise ModelError(
            f"{where} names the architecture {kind!r}, which is no causal language model: it does "
            "not give a next word from the words before. Name a decoder such as Llama or GPT-2"
        )
    if "quantization_config" in config:
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise ModelError(
            f"{where} says that the weights are quantized ({method}). lmhead opens weights as "
            "numbers, or GGUF files: take one of these"
        )


def _cut(model: Any, folder: Path) -> tuple[nn.Module, LMHead]:
    """The inner model, and our head on the weight of the outer one."""
    linear = model.get_output_embeddings()
    if not isinstance(linear, nn.Linear):
        raise ModelError(
            f"the model in {folder} must end in a linear layer; {type(model).__name__} ends in "
            f"{type(linear).__name__}"
        )
    base = model.get_decoder()
    if base is model:
        base = model.base_model
    softcap, scale = read_map(model.config)
    return base, LMHead.from_linear(linear, softcap=softcap, scale=scale)


def read_map(config: Any) -> tuple[float | None, float]:
    """What a model does to its logits: the bound of soft-capping, and the factor before it.

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
def _agree(model: Any, base: nn.Module, head: LMHead, folder: Path) -> Frame | None:
    """Let the model read one token: its logits must be those of the head. Gives its frame."""
    ids = torch.tensor([[min(head.vocab_size - 1, 7)]])
    kept: list[Any] = []

    def keep(module: nn.Module, args: Any, out: Any) -> None:  # noqa: ARG001
        kept.append(out)

    hook = base.register_forward_hook(keep)
    try:
        theirs = model(input_ids=ids, use_cache=False).logits[0, -1]
    finally:
        hook.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)  # one row
        ours = head(kept[-1].last_hidden_state[0, -1]).materialize()
    if not _close(ours, theirs):
        raise ModelError(
            f"the head of {type(model).__name__} in {folder} is more than a linear layer with "
            "bias, scale and soft-capping: lmhead would not give its logits, and does not open it"
        )
    return find_frame(base, lambda: base(input_ids=ids, use_cache=False, return_dict=True))


def _close(ours: Tensor, theirs: Tensor) -> bool:
    limit = _AGREE.get(ours.dtype, _AGREE_HALF) * float(theirs.abs().max())
    return ours.shape == theirs.shape and bool(((ours - theirs).abs() <= limit).all())


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def in_short(error: Exception) -> str:
    """What another library says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text if len(text) <= 300 else text[:300] + " ...").rstrip(".")
