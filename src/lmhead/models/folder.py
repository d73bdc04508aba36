"""The files of a model's folder, checked before anything opens them.

What is missing, cut off or of the wrong kind is a `ModelError` that names the file and what to do.
Only headers are read: a check of gigabytes takes a moment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from lmhead.errors import ModelError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class Marks(NamedTuple):
    """The ids that begin and end a text."""

    bos: int | None
    eos: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(_no_config(path)) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # no JSON, or no UTF-8
        raise ModelError(
            f"{path} is no JSON ({error}): it is damaged. Fetch it again from where it comes from"
        ) from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} must hold a JSON object; got {type(found).__name__}")
    return found


def _no_config(path: Path) -> str:
    folder = path.parent
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder} holds an adapter, not a model. Merge it into its model first (in peft: "
            "model.merge_and_unload().save_pretrained(folder)) and open that"
        )
    return (
        f"{folder} holds no model: there is no {path.name}. Name a folder with {path.name}, "
        "safetensors and tokenizer.json, a .gguf file, or one of `lmhead models list`"
    )


def check_weights(folder: Path) -> list[Path]:
    """The safetensors files of a folder, each whole, and all that its index names.

    Raises:
        ModelError: there is none, one is missing or damaged, or there are only pickles.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if single.is_file():
        _tensors(single)
        return [single]
    if not index.is_file():
        raise ModelError(_no_weights(folder))
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} must have a weight_map of tensors to files: fetch it again")
    shards = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing)}, of the {len(shards)} files that {index.name} "
            "names: fetch what is missing"
        )
    for name in shards:
        found = _tensors(folder / name)
        lacking = [key for key, file in weight_map.items() if file == name and key not in found]
        if lacking:
            raise ModelError(
                f"{folder / name} lacks the tensor {lacking[0]}, which {index.name} says is in "
                "it: they do not belong together. Fetch both again"
            )
    return [folder / name for name in shards]


def _no_weights(folder: Path) -> str:
    pickles = sorted(file.name for kind in _PICKLES for file in folder.glob(kind))
    if pickles:
        return (
            f"{folder} has its weights only as pickled Python objects ({pickles[0]}), which may "
            "run any code when they are opened: lmhead never reads them. Take the model's "
            "safetensors files, or convert it where you trust it: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    return f"{folder} has a config.json but no model.safetensors: fetch the weights as well"


def _tensors(path: Path) -> set[str]:
    """The names of a file's tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is no whole safetensors file ({error}): it is damaged or was not fetched to "
            "the end. Fetch it again"
        ) from error


def read_marks(folder: Path, config: dict[str, Any]) -> Marks:
    """The ids that begin and end a text: of generation_config.json, else of config.json."""
    path = folder / "generation_config.json"
    settings = read_json(path) if path.is_file() else {}
    text = config.get("text_config")
    sources = [settings, config, text if isinstance(text, dict) else {}]

    def first(name: str) -> Any:
        return next((s[name] for s in sources if s.get(name) is not None), None)

    bos, eos = first("bos_token_id"), first("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    for name, value in (("bos_token_id", [] if bos is None else [bos]), ("eos_token_id", ends)):
        if not all(isinstance(id, int) and not isinstance(id, bool) and id >= 0 for id in value):
            raise ModelError(f"{folder / 'config.json'}: {name} must be an id; got {value}")
    return Marks(bos, tuple(ends))
