"""Files made to break a reader: refused with file, field, what it must be and what it was.

Each of these once raised a bare exception, ran for minutes or took gigabytes. `tests/fuzz` looks
for more.
"""

import json
import os
import resource
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fuzz import corpus
from fuzz.mutations import gguf_fields
from safetensors.torch import load_file, save_file

from lmhead.cli import main
from lmhead.errors import ModelError
from lmhead.models import load_huggingface, load_llama2c, load_translator, open_model
from lmhead.models.model_files import Fields

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def small_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No case takes more than 300 MB beyond what is loaded."""
    monkeypatch.setenv("LMHEAD_CACHE", str(tmp_path / "cache"))
    pytest.importorskip("transformers")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024


def edit(path: Path, **changes: Any) -> None:
    """Change values of a JSON file; `a__b` is the entry b of the object a."""
    found = json.loads(path.read_text())
    for name, value in changes.items():
        *outer, last = name.split("__")
        node = found
        for part in outer:
            node = node[part]
        node[last] = value
    path.write_text(json.dumps(found))


def refusal(path: Path) -> str:
    """The message with which a model is refused: one line."""
    with pytest.raises(ModelError) as caught:
        open_model(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


BERT = {"type": "BertProcessing", "sep": ["</s>", 9999], "cls": ["<s>", 1]}

# --- config.json ----------------------------------------------------------------------------------

WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer in [1, 21]; got 1000"),
    ({"num_hidden_layers": 2**63}, "num_hidden_layers must be an integer in [1, 21]; got 9223"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers must be an integer in [1, 21]; got '2'"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be an integer in [1, 21]; got True"),
    ({"head_dim": 10**9, "rope_scaling": corpus.LLAMA3}, "q_proj.weight must be (2000000000, 16)"),
    ({"head_dim": 2**63}, "head_dim must be an integer of at least 1; got 9223"),
    ({"num_attention_heads": 0}, "num_attention_heads must be an integer of at least 1; got 0"),
    ({"vocab_size": 10**9}, "embed_tokens.weight must be (1000000000, 16); got (264, 16)"),
    ({"hidden_size": 3.5}, "hidden_size must be an integer of at least 1; got 3.5"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a finite number above 0; got 'small'"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number above 0; got nan"),
    ({"rope_theta": -1}, "rope_theta must be a finite number above 0; got -1"),
    ({"rope_scaling": 3}, "rope_scaling must be an object; got 3"),
    ({"rope_scaling": {"rope_type": []}}, "rope_parameters.rope_type must be a string; got []"),
    ({"quantization_config": 3}, "quantization_config must be an object; got 3"),
    ({"model_type": ["llama"]}, "model_type must be a string; got ['llama']"),
    ({"eos_token_id": {}}, "eos_token_id must be a token id or a list of them; got {}"),
    ({"eos_token_id": [2, "x"]}, "eos_token_id must be a token id or a list of them; got [2, 'x']"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false; got 'no'"),
    ({"max_position_embeddings": []}, "max_position_embeddings must be an integer"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_FIELDS, ids=str)
def test_fields_of_a_llama(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    corpus.write_llama(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path / "config.json", **changes)
    found = refusal(tmp_path)
    assert message in found
    assert str(tmp_path) in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer in [1, 21]"),
        ({"num_hidden_layers": -2}, "num_hidden_layers must be an integer in [1, 21]; got -2"),
        ({"vocab_size": 10**9}, "but its files hold 12,880"),
        ({"hidden_size": 2**20}, "but its files hold 12,880"),
        ({"head_dim": 10**9}, "but its files hold 12,880"),
        ({"max_position_embeddings": 2**62}, "max_position_embeddings must be an integer"),
        (
            {"num_local_experts": 10**8},
            "num_local_experts must be an integer in",
        ),
        ({"rope_scaling": 3}, "config.json"),
    ],
    ids=str,
)
def test_fields_left_to_transformers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    corpus.write_llama(tmp_path, hidden_act="gelu")
    edit(tmp_path / "config.json", **changes)
    assert message in refusal(tmp_path)


def test_a_large_base_of_rotary_angles(tmp_path: Path) -> None:
    corpus.write_llama(tmp_path, hidden_act="gelu", rope_theta=100_000_000_000)
    open_model(tmp_path)
    corpus.write_llama(tmp_path, rope_theta=100_000_000_000)
    open_model(tmp_path)


def test_learned_positions_and_masks_are_bounded(tmp_path: Path) -> None:
    corpus.write_gpt2(tmp_path)
    edit(tmp_path / "config.json", n_positions=10**8)
    assert "but its files hold" in refusal(tmp_path)
    edit(tmp_path / "config.json", n_positions=64, n_layer=10**8)
    assert "n_layer must be an integer in [1, 28]" in refusal(tmp_path)


def test_nesting(tmp_path: Path) -> None:
    corpus.write_llama(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    assert "nested too deeply" in refusal(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        corpus.write_llama(tmp_path)
        (tmp_path / file).write_text("[" * 100_000)
        assert file in refusal(tmp_path)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("tokenizer_config.json", {"chat_template": 7}, "chat_template must be a string; got 7"),
        ("tokenizer_config.json", {"chat_template": [7]}, "a string or a list of objects; got [7]"),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "default", "template": 7}]},
            "chat_template.template must be a string; got 7",
        ),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id must be a token id"),
        ("tokenizer.json", {"model__merges": [["a", "nothing"]]}, "nothing"),
        ("tokenizer.json", {"model__vocab": {"a": 4_000_000_000}}, "tokenizer.json"),
        ("tokenizer.json", {"post_processor": BERT}, "must have token ids below 264"),
    ],
)
def test_other_files(tmp_path: Path, file: str, changes: dict[str, Any], message: str) -> None:
    corpus.write_llama(tmp_path)
    edit(tmp_path / file, **changes)
    found = refusal(tmp_path)
    assert message in found
    assert file in found


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool, torch.complex64])
@pytest.mark.parametrize("sample", ["llama", "run"])
def test_dtypes_that_are_no_weights(tmp_path: Path, sample: str, dtype: torch.dtype) -> None:
    corpus.SAMPLES[sample].write(tmp_path)
    (path,) = tmp_path.rglob("model.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if "norm" in name)
    save_file(tensors | {name: tensors[name].to(dtype)}, path)
    found = refusal(tmp_path)
    assert name in found
    assert "must be" in found


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_header_of_odd_length(tmp_path: Path, activation: str) -> None:
    """The data of such a file is not aligned, which is legal, but nothing for the kernels."""
    corpus.write_llama(tmp_path, hidden_act=activation)
    path = tmp_path / "model.safetensors"
    expected = open_model(tmp_path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.unlink()
    path.write_bytes(
        struct.pack("<Q", length + 3) + data[8 : 8 + length] + b"   " + data[8 + length :]
    )
    model = open_model(tmp_path)
    hidden, _ = model.hidden(torch.tensor([[1, 5, 9]]))
    assert torch.equal(hidden, expected.hidden(torch.tensor([[1, 5, 9]]))[0])
    assert torch.equal(model.head(hidden).argmax(-1), expected.head(hidden).argmax(-1))
    assert model.head(hidden[:, -1]).topk(3).indices.shape == (1, 3)


@pytest.mark.parametrize("wanted", ["bfloat16", "float32", None, "int8"])
def test_mixed_dtypes(tmp_path: Path, wanted: str | None) -> None:
    corpus.write_llama(tmp_path)
    edit(tmp_path / "config.json", dtype=wanted)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    half = {name: t if "lm_head" in name else t.bfloat16() for name, t in tensors.items()}
    save_file(half, path)
    model = open_model(tmp_path)
    dtype = torch.bfloat16 if wanted == "bfloat16" else torch.float32
    assert model.head.weight.dtype == dtype
    ids = torch.tensor([[1, 5, 9]])
    hidden, _ = model.hidden(ids)
    assert hidden.dtype == dtype
    save_file({name: tensor.to(dtype) for name, tensor in half.items()}, path)
    assert torch.equal(hidden, open_model(tmp_path).hidden(ids)[0])


@pytest.mark.parametrize(
    "file", ["../model-0.safetensors", "/etc/passwd", "..", "a/b", "", 3, "x" * 5000]
)
def test_shards_outside_the_folder(tmp_path: Path, file: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    corpus.write_sharded(folder)
    (folder / "model-0.safetensors").rename(tmp_path / "model-0.safetensors")
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"] = {
        name: file if shard == "model-0.safetensors" else shard
        for name, shard in found["weight_map"].items()
    }
    index.write_text(json.dumps(found))
    message = refusal(folder)
    assert "weight_map" in message or "lacks xxx" in message


# --- pipes and devices ----------------------------------------------------------------------------

FILES = ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: p.symlink_to("/dev/zero"), Path.mkdir])
@pytest.mark.parametrize("file", [*FILES, "tokenizer_config.json"])
def test_no_regular_file(tmp_path: Path, file: str, make: Callable[[Path], None]) -> None:
    corpus.write_llama(tmp_path)
    (tmp_path / file).unlink()
    make(tmp_path / file)
    assert f"{file} must be a regular file" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["small.gguf", "model.bin"])
def test_a_pipe_in_place_of_a_model(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "must be a regular file" in refusal(tmp_path / name)
    with pytest.raises(ModelError, match="must be a regular file"):
        load_llama2c(tmp_path / name)


def test_a_name_that_no_file_can_have() -> None:
    assert "there is no model" in refusal(Path("a\0b"))
    assert "there is no model" in refusal(Path("x" * 5000))


def test_a_file_that_is_too_long(tmp_path: Path) -> None:
    corpus.write_llama(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    assert "config.json must have at most 268,435,456 bytes; got 1,099," in refusal(tmp_path)


# --- GGUF -----------------------------------------------------------------------------------------


def set_field(path: Path, name: str, value: bytes) -> None:
    """Give a field of a GGUF file another type and value."""
    data = path.read_bytes()
    for begin, end in gguf_fields(data):
        if data[:begin].endswith(name.encode()):
            path.write_bytes(data[:begin] + value + data[end:] + bytes(32))  # the data may move
            return
    raise AssertionError(f"there is no field {name}")


def u32(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<IQ", 8, len(data)) + data


def strings(*texts: str) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(string(t)[4:] for t in texts)


NESTED = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 990 + struct.pack("<IQ", 4, 0)
GGUF_FIELDS = [
    ("llama.block_count", u32(2**30), "llama.block_count must be an integer in [1, 21]; got 1073"),
    ("llama.block_count", string("2"), "llama.block_count must be an integer in [1, 21]; got '2'"),
    ("general.alignment", u32(0), "general.alignment must be an integer in [1, 1048576]; got 0"),
    ("general.alignment", string("x"), "general.alignment must be an integer"),
    ("llama.attention.head_count", u32(0), "head_count must be an integer in [1, 32]; got 0"),
    ("llama.attention.head_count", u32(3), "head_count must be a divisor of 32"),
    ("llama.attention.head_count", NESTED, "arrays must be nested at most 4 deep"),
    ("llama.attention.head_count_kv", struct.pack("<IIQI", 9, 4, 1, 2), "must be an integer"),
    ("llama.rope.freq_base", struct.pack("<If", 6, float("inf")), "a finite number above 0"),
    ("llama.context_length", struct.pack("<Iq", 11, -5), "context_length must be an integer"),
    ("llama.feed_forward_length", u32(2**31 - 1), "mlp.gate_proj.weight must be (2147483647, 32)"),
    ("tokenizer.ggml.merges", strings("Ġa"), "merges must be pairs of tokens"),
    ("tokenizer.ggml.merges", strings("Ġ nothing"), "tokenizer.ggml must describe a tokenizer"),
    ("tokenizer.ggml.merges", u32(3), "tokenizer.ggml.merges must be a list of values of type str"),
    ("tokenizer.ggml.tokens", strings("a", "b"), "small.gguf"),
    ("tokenizer.ggml.tokens", struct.pack("<IIQ", 9, 8, 2**60), "it claims 1,152,921,504,606,846"),
    ("tokenizer.ggml.tokens", struct.pack("<IIQ", 9, 0, 2**63), "it claims 9,223,372,036,854,775"),
    ("tokenizer.ggml.token_type", u32(3), "token_type must be a list of 264 values of type int"),
    ("tokenizer.ggml.bos_token_id", u32(9999), "bos_token_id must be an integer in [0, 263]"),
    ("tokenizer.ggml.model", u32(1), "tokenizer.ggml.model must be a string; got 1"),
    ("tokenizer.chat_template", u32(1), "tokenizer.chat_template must be a string; got 1"),
    ("general.architecture", u32(1), "small.gguf: general.architecture must be a string; got 1"),
    ("llama.context_length", struct.pack("<I", 77), "a field has the unknown type 77"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), GGUF_FIELDS, ids=[name for name, _, _ in GGUF_FIELDS]
)
def test_gguf_fields(tmp_path: Path, name: str, value: bytes, message: str) -> None:
    corpus.write_gguf(tmp_path)
    set_field(tmp_path / "small.gguf", name, value)
    assert message in refusal(tmp_path / "small.gguf")


def test_a_gguf_of_many_layers_left_to_transformers(tmp_path: Path) -> None:
    corpus.write_gguf(tmp_path, arch="qwen2")
    set_field(tmp_path / "small.gguf", "qwen2.block_count", u32(2**30))
    assert "qwen2.block_count must be an integer in [1, 27]" in refusal(tmp_path / "small.gguf")


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, struct.pack("<I", 9), "must have 1 to 4 dimensions; got 9"),
        (4, struct.pack("<Q", 2**62), "is truncated or corrupt"),
        (4, struct.pack("<Q", 0), "must have rows of a multiple of"),
        (20, struct.pack("<I", 24), "must be of a floating or quantized type; got I8"),
        (20, struct.pack("<I", 999), "must have a type that the package gguf knows; got 999"),
        (24, struct.pack("<Q", 2**62), "is truncated or corrupt"),
    ],
)
def test_gguf_tensors(tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    corpus.write_gguf(tmp_path)
    path = tmp_path / "small.gguf"
    data = path.read_bytes()
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + offset
    path.write_bytes(data[:at] + value + data[at + len(value) :])
    assert message in refusal(path)


def test_a_long_sentencepiece_token(tmp_path: Path) -> None:
    corpus.write_gguf(tmp_path, pieces=True)
    tokens = ["a" * 100_000, *(f"t{i}" for i in range(263))]
    set_field(tmp_path / "small.gguf", "tokenizer.ggml.tokens", strings(*tokens))
    assert "at most 512 characters each; got one of 100,000" in refusal(tmp_path / "small.gguf")


# --- our own checkpoints --------------------------------------------------------------------------

SIZES: list[dict[str, Any]] = [
    {"model__vocab_size": 10**9},
    {"model__vocab_size": 50_000, "model__hidden_size": 50_000},
    {"model__num_hidden_layers": 10**9},
    {"model__head_dim": 10**8},
    {"model__intermediate_size": 10**9},
    {"model__max_length": 10**9},
    {"model__bias": "yes"},
    {"model__rope_factors": 3},
    {"model": []},
    {"head": {"kind": []}},
    {"head": {"kind": "adaptive", "cutoffs": "x"}},
    {"head": {"kind": "adaptive", "cutoffs": [5], "div_value": 1e-9}},
    {"head": 3},
    {"eos_token_ids": 3},
    {"eos_token_ids": [10**9]},
    {"kind": {}},
]


@pytest.mark.parametrize("changes", SIZES, ids=str)
def test_sizes_of_a_checkpoint(tmp_path: Path, changes: dict[str, Any]) -> None:
    corpus.write_run(tmp_path)
    (path,) = tmp_path.rglob("config.json")
    edit(path, **changes)
    assert str(path) in refusal(tmp_path)


def test_the_tree_of_a_checkpoint_is_never_a_path(tmp_path: Path) -> None:
    corpus.write_run(tmp_path, "hierarchical")
    (path,) = tmp_path.rglob("config.json")
    os.mkfifo(tmp_path / "pipe")
    edit(path, head={"kind": "hierarchical", "tree": str(tmp_path / "pipe")})
    open_model(tmp_path)  # the tree is in the weights


@pytest.mark.parametrize(
    "changes",
    [{"model__encoder_layers": 10**9}, {"model__vocab_size": 10**9}, {"bos_token_id": "x"}],
    ids=str,
)
def test_sizes_of_a_translator(tmp_path: Path, changes: dict[str, Any]) -> None:
    corpus.write_translator(tmp_path)
    (path,) = tmp_path.rglob("config.json")
    edit(path, **changes)
    with pytest.raises(ModelError, match=r"config.json"):
        load_translator(tmp_path)


# --- chat templates -------------------------------------------------------------------------------

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}{{ ns.x }}"
)


@pytest.mark.parametrize(
    "template",
    [ENDLESS, DOUBLING, "{{ 'a' * 10**10 }}", "{{ '%999999999d' % 1 }}", "{{ 'a' * 2**25 }}"],
    ids=["endless", "doubling", "product", "format", "output"],
)
def test_chat_templates_without_end(tmp_path: Path, template: str) -> None:
    corpus.write_llama(tmp_path)
    edit(tmp_path / "tokenizer_config.json", chat_template=template)
    chat = load_huggingface(tmp_path).chat
    assert chat is not None
    with pytest.raises(ModelError, match=r"tokenizer_config.json cannot be used: it"):
        chat.render([{"role": "user", "content": "Hello"}])


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [["next", "{}", "a"], ["generate", "{}", "a"], ["inspect", "{}"], ["lens", "{}", "a"]],
)
def test_a_command_exits_with_3_and_one_line(tmp_path: Path, arguments: list[str]) -> None:
    corpus.write_llama(tmp_path)
    edit(tmp_path / "config.json", num_hidden_layers=10**9)
    result = CliRunner().invoke(main, [part.format(tmp_path) for part in arguments])
    assert result.exit_code == 3
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert "config.json: num_hidden_layers must be" in lines[0]


# --- the fields themselves ------------------------------------------------------------------------


def test_a_long_value_is_shortened_in_the_message() -> None:
    fields = Fields(Path("config.json"), {"a": "x" * 10_000, "b": list(range(10_000))})
    for name in "ab":
        assert len(str(fields.error(name, "a number"))) < 150
    assert str(fields.error("c", "a number")).endswith("c must be a number; got nothing")
