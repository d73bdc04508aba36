"""The files of a Hugging Face folder, validated before anything opens them.

Only headers of the weights are read: checking gigabytes takes a moment.
"""

from __future__ import annotations

from pathlib import Path

from lmhead.errors import ModelError
from lmhead.models.model_files import Fields, TensorHeader, exists, read_json, read_tensor_headers

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def read_config(folder: Path) -> Fields:
    """Return the fields of config.json."""
    path = folder / "config.json"
    if exists(path):
        return read_json(path)
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            f"{folder} holds an adapter, not a model. Merge it into its model first (in peft: "
            "model.merge_and_unload().save_pretrained(folder)) and open that"
        )
    raise ModelError(
        f"{folder} holds no model: there is no config.json. Name a folder with config.json, "
        "safetensors and tokenizer.json, a .gguf file, or one of `lmhead models list`"
    )


def read_weights(folder: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a folder by name, from one safetensors file or shards with an index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if exists(single):
        return read_tensor_headers(single)
    if not exists(index):
        pickles = sorted(file.name for kind in _PICKLES for file in folder.glob(kind))
        if pickles:
            raise ModelError(
                f"{folder} has its weights only as pickled Python objects ({pickles[0]}), which "
                "may run any code when they are opened: lmhead never reads them. Take the model's "
                "safetensors files, or convert it where you trust it: "
                "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
            )
        raise ModelError(
            f"{folder} has a config.json but no model.safetensors: download the weights as well"
        )
    weight_map = read_json(index).object("weight_map")
    if not weight_map.values:
        raise ModelError(f"{index}: weight_map must map tensors to files; got nothing")
    for name in weight_map.values:
        file = weight_map.text(name)
        if file in ("", ".", "..") or set(file) & set("/\\\0"):
            raise weight_map.error(name, "the name of a file in the same folder")
    shards = sorted(set(weight_map.values.values()))
    missing = [shard for shard in shards if not exists(folder / shard)]
    if missing:
        raise ModelError(
            f"{folder} lacks {', '.join(missing[:5])}, of the {len(shards)} files that "
            f"{index.name} names: download what is missing"
        )
    headers = {shard: read_tensor_headers(folder / shard) for shard in shards}
    for name, shard in weight_map.values.items():
        if name not in headers[shard]:
            raise ModelError(
                f"{folder / shard} lacks the tensor {name}, which {index.name} says is in it: "
                "they do not belong together. Download both again"
            )
    return {name: header for shard in shards for name, header in headers[shard].items()}


def read_special_tokens(folder: Path, config: Fields) -> tuple[int | None, tuple[int, ...]]:
    """Return the id that begins a text, and those that end one: of generation, else of model."""
    path = folder / "generation_config.json"
    text = config.values.get("text_config")
    sources = [read_json(path)] if exists(path) else []
    sources += [config, Fields(config.path, text)] if isinstance(text, dict) else [config]

    def ids(name: str) -> list[int]:
        source = next((source for source in sources if name in source), config)
        value = source.values.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(id) is int and 0 <= id < 2**31 for id in listed):
            raise source.error(name, "a token id or a list of them")
        return listed

    return next(iter(ids("bos_token_id")), None), tuple(ids("eos_token_id"))
