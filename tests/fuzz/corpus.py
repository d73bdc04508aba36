"""Small valid files of every format, made on the fly.

Each sample is a folder; `SAMPLES` names what to open in it and how often it is mutated.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llama2c_files import random_weights, vocabulary, write_checkpoint, write_vocabulary
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lmhead.models.checkpoint import build_head, specify_head, weights_of
from lmhead.nn import DecoderConfig, DecoderLM, EncoderDecoder, EncoderDecoderConfig

VOCAB, SIZE, INNER, HEADS, LAYERS = 264, 16, 24, 2, 2
TEMPLATE = "{% for m in messages %}{{ bos_token + m['role'] + m['content'] }}{% endfor %}"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@dataclass(frozen=True)
class Sample:
    """A kind of model.

    Attributes:
        write: makes the files in an empty folder.
        opens: the file or folder to open, relative to the folder.
        share: how often it is chosen, relative to the others.
        slow: whether transformers opens it.
    """

    write: Callable[[Path], object]
    opens: str = "."
    share: int = 10
    slow: bool = False


def tokenizer_of(vocab: int) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<pad>", "<s>", "</s>", "<unk>", *alphabet, "Ġa", "Ġt", "Ġth"]
    tokens += [f"[{i}]" for i in range(vocab - len(tokens))]
    merges = [("Ġ", "a"), ("Ġ", "t"), ("Ġt", "h")]
    model = models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges)
    tokenizer: Any = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:4])
    return tokenizer


def llama_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / 4).to(dtype)

    tensors = {
        "model.embed_tokens.weight": random(VOCAB, SIZE),
        "model.norm.weight": random(SIZE) + 1,
        "lm_head.weight": random(VOCAB, SIZE),
    }
    for i in range(LAYERS):
        block = f"model.layers.{i}."
        for part in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}{part}.weight"] = random(SIZE) + 1
        for part in "qkvo":
            tensors[f"{block}self_attn.{part}_proj.weight"] = random(SIZE, SIZE)
        for part in ("gate", "up"):
            tensors[f"{block}mlp.{part}_proj.weight"] = random(INNER, SIZE)
        tensors[f"{block}mlp.down_proj.weight"] = random(SIZE, INNER)
    return tensors


def llama_config(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": SIZE // HEADS,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
        **changes,
    }


def write_beside(folder: Path, config: dict[str, Any]) -> None:
    """Everything of a Hugging Face folder but the weights."""
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_of(VOCAB).save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2]}')
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))


def write_llama(folder: Path, **changes: Any) -> None:
    write_beside(folder, llama_config(**changes))
    save_file(llama_tensors(), folder / "model.safetensors", metadata={"format": "pt"})


def write_sharded(folder: Path) -> None:
    write_beside(folder, llama_config(rope_scaling=LLAMA3, dtype="bfloat16"))
    tensors = llama_tensors(torch.bfloat16)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_gpt2(folder: Path) -> None:
    sizes = {"n_embd": SIZE, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    write_beside(folder, {"model_type": "gpt2", "vocab_size": VOCAB, **sizes, **special})
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCAB, SIZE), "wpe.weight": (64, SIZE)}
    norms = ["ln_f"]
    for i in range(LAYERS):
        for part, out in (("attn.c_attn", 3 * SIZE), ("attn.c_proj", SIZE), ("mlp.c_fc", 64)):
            shapes |= {f"h.{i}.{part}.weight": (SIZE, out), f"h.{i}.{part}.bias": (out,)}
        shapes |= {f"h.{i}.mlp.c_proj.weight": (64, SIZE), f"h.{i}.mlp.c_proj.bias": (SIZE,)}
        norms += [f"h.{i}.ln_1", f"h.{i}.ln_2"]
    for norm in norms:
        shapes |= {f"{norm}.weight": (SIZE,), f"{norm}.bias": (SIZE,)}
    tensors = {
        f"transformer.{name}": torch.randn(*shape, generator=generator) / 4
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_gguf(
    folder: Path, *, arch: str = "llama", kind: str = "F32", pieces: bool = False
) -> None:
    import gguf

    size, inner, heads = 32, 32, 2  # rows of a multiple of 32, for quantized types
    writer: Any = gguf.GGUFWriter(folder / "small.gguf", arch)
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500.0)
    writer.add_vocab_size(VOCAB)
    writer.add_custom_alignment(32)
    if pieces:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        tokens += ["▁", "a", "b", "▁a", "ab"]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(i) for i in range(VOCAB)])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (VOCAB - 259))
        writer.add_add_space_prefix(True)
        writer.add_unk_token_id(0)
    else:
        vocab = tokenizer_of(VOCAB).get_vocab()
        tokens = sorted(vocab, key=lambda token: int(vocab[token]))
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_types([3] * 4 + [1] * (VOCAB - 4))
        writer.add_token_merges(["Ġ a", "Ġ t", "Ġt h"])
        writer.add_chat_template(TEMPLATE)
    writer.add_token_list(tokens)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    shapes = {"token_embd": (VOCAB, size), "output_norm": (size,), "output": (VOCAB, size)}
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.{part}": (size,) for part in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.attn_{part}": (size, size) for part in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{part}": (inner, size) for part in ("gate", "up", "down")}
    draw = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = draw.standard_normal(shape).astype(np.float32) / 4
        if len(shape) == 2 and kind != "F32":
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(f"{name}.weight", array)
    if arch == "qwen2":
        for i in range(LAYERS):
            for part in "qkv":
                writer.add_tensor(f"blk.{i}.attn_{part}.bias", np.zeros(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama2c(folder: Path) -> None:
    write_vocabulary(folder / "tok300.bin", vocabulary(["a", "b", " a", "ab"]))
    write_checkpoint(folder / "model.bin", random_weights(0, tied=False))


def write_run(folder: Path, head: str = "full") -> None:
    """The folder of a run with one checkpoint."""
    config = DecoderConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, max_length=16
    )
    torch.manual_seed(0)
    frequencies = None if head == "full" else torch.arange(VOCAB, 0, -1).float()
    spec = {"kind": head} | ({"cutoffs": [50, 100]} if head == "adaptive" else {})
    model = DecoderLM(config, head=build_head(spec, config, frequencies))
    about = {
        "format": "lmhead",
        "version": 1,
        "kind": "decoder",
        "model": config.to_dict(),
        "head": specify_head(head, model.head),
        "eos_token_ids": [2],
        "training": {"steps": 2},
    }
    _write_checkpoint(folder, about, model)


def write_translator(folder: Path) -> None:
    config = EncoderDecoderConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        encoder_layers=1,
        decoder_layers=1,
        num_attention_heads=2,
        max_length=16,
    )
    torch.manual_seed(0)
    about = {
        "format": "lmhead",
        "version": 1,
        "kind": "encoder-decoder",
        "model": config.to_dict(),
        "bos_token_id": 1,
        "eos_token_ids": [2],
    }
    _write_checkpoint(folder, about, EncoderDecoder(config))


def _write_checkpoint(folder: Path, about: dict[str, Any], model: torch.nn.Module) -> None:
    checkpoint = folder / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(json.dumps(about))
    (checkpoint / "training.json").write_text('{"best_step": 2, "step": 2}')
    save_file(
        {k: v.contiguous() for k, v in weights_of(model).items()}, checkpoint / "model.safetensors"
    )
    tokenizer_of(VOCAB).save(str(checkpoint / "tokenizer.json"))


SAMPLES = {
    "llama": Sample(write_llama, share=20),
    "sharded": Sample(write_sharded),
    "gpt2": Sample(write_gpt2, share=3, slow=True),
    "llama-gelu": Sample(lambda folder: write_llama(folder, hidden_act="gelu"), share=3, slow=True),
    "gguf": Sample(write_gguf, "small.gguf", share=20),
    "gguf-q8": Sample(lambda folder: write_gguf(folder, kind="Q8_0"), "small.gguf"),
    "gguf-pieces": Sample(lambda folder: write_gguf(folder, pieces=True), "small.gguf"),
    "gguf-qwen2": Sample(
        lambda folder: write_gguf(folder, arch="qwen2"), "small.gguf", share=2, slow=True
    ),
    "llama2c": Sample(write_llama2c, "model.bin"),
    "run": Sample(write_run),
    "run-adaptive": Sample(lambda folder: write_run(folder, "adaptive"), share=5),
    "run-hierarchical": Sample(lambda folder: write_run(folder, "hierarchical"), share=5),
    "translator": Sample(write_translator),
}


def write_corpus(folder: Path) -> None:
    """Write every sample into a folder of its name."""
    for name, sample in SAMPLES.items():
        (folder / name).mkdir(parents=True)
        sample.write(folder / name)
