"""Hugging Face folders: our head on their hidden states gives their logits, in every family."""

import socket
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead import LMHead, PerformanceWarning, generate
from lmhead.errors import ModelError
from lmhead.models import LanguageModel, load_huggingface, open_model
from lmhead.models.huggingface_body import HuggingFaceBody
from lmhead.nn import LlamaBody
from models import hf_folders

IDS = torch.tensor([[1, 70, 8, 260, 33, 9, 9, 120], [1, 5, 261, 44, 17, 99, 30, 262]])


class Pair(NamedTuple):
    ours: LanguageModel
    theirs: Any
    family: str


@pytest.fixture(scope="module", params=hf_folders.FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = hf_folders.write(folder, request.param)
    return Pair(load_huggingface(folder, direct=False), theirs, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("llama")
    hf_folders.write(folder)
    return open_model(folder)


def dense(logits: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        found: Tensor = logits.materialize()
    return found


def logits_of(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids).logits
    return found


def test_the_logits_are_those_of_the_model(pair: Pair) -> None:
    hidden, cache = pair.ours.hidden(IDS)
    assert_close(dense(pair.ours.head(hidden)), logits_of(pair.theirs), atol=1e-5, rtol=1e-5)
    assert cache.length == 8
    assert not hidden.requires_grad


def test_reading_in_two_goes_gives_the_same(pair: Pair) -> None:
    whole, _ = pair.ours.hidden(IDS)
    _, cache = pair.ours.hidden(IDS[:, :5])
    kept = pair.ours.hidden(IDS[:, 5:], cache)[0]
    assert_close(kept, whole[:, 5:], atol=1e-5)
    # The cache is a value: it can be read on from again, and by some rows only.
    again, more = pair.ours.hidden(IDS[:, 5:], cache)
    assert torch.equal(again, kept)
    assert (cache.length, more.length) == (5, 8)
    rows = torch.tensor([1, 1, 0])
    chosen, _ = pair.ours.hidden(IDS[rows, 5:], cache.select(rows))
    assert_close(chosen, whole[rows, 5:], atol=1e-5)


def test_padding_on_the_left_changes_nothing(pair: Pair) -> None:
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, :3] = False
    ids = IDS.clone()
    ids[1, :3] = 0
    hidden, cache = pair.ours.body(ids[:, :6], None, mask[:, :6])
    last, _ = pair.ours.body(ids[:, 6:], cache, mask)
    alone, _ = pair.ours.hidden(IDS[1:, 3:])
    assert_close(hidden[1, 3:], alone[0, :3], atol=1e-5)
    assert_close(last[1], alone[0, 3:], atol=1e-5)


def test_layers_end_in_the_hidden_states(pair: Pair) -> None:
    layers = pair.ours.layers(IDS)
    hidden, _ = pair.ours.hidden(IDS)
    assert [layer.shape for layer in layers] == [hidden.shape] * 3
    assert_close(layers[-1], hidden, atol=1e-6)
    # Every layer went through the final norm: with the last block taken away, the middle layer is
    # what the model gives.
    theirs = pair.theirs
    blocks = next(m for m in theirs.modules() if isinstance(m, torch.nn.ModuleList))
    block = blocks[1]
    del blocks[1]
    theirs.config.get_text_config().num_hidden_layers = 1
    inner = pair.ours.body
    assert isinstance(inner, HuggingFaceBody)
    try:
        shorter = logits_of(theirs)
    finally:
        blocks.append(block)
        theirs.config.get_text_config().num_hidden_layers = 2
    assert_close(dense(pair.ours.head(layers[1])), shorter, atol=1e-5, rtol=1e-5)


def test_the_head_shares_the_models_weight(pair: Pair) -> None:
    head, body = pair.ours.head, pair.ours.body
    assert isinstance(head, LMHead)
    assert isinstance(body, HuggingFaceBody)
    tied = pair.theirs.config.get_text_config().tie_word_embeddings
    embedding = body.base.get_input_embeddings().weight  # type: ignore[operator]
    assert (head.weight is embedding) == tied
    assert not head.weight.requires_grad
    linear = pair.theirs.get_output_embeddings()
    assert torch.equal(head.weight, linear.weight)
    assert (head.bias is None) == (linear.bias is None)


def test_what_bends_the_logits_is_read_from_the_configuration() -> None:
    from lmhead.models.huggingface import read_softcap_and_scale as read

    found = {family: read(hf_folders.make(family).config) for family in ("gemma2", "cohere")}
    assert found == {"gemma2": (0.2, 1.0), "cohere": (None, 0.25)}
    assert read(hf_folders.make("granite").config) == (None, 1 / 8)
    assert read(hf_folders.make("minicpm3").config) == (None, 4 / 16)


def test_greedy_generation_is_that_of_transformers(pair: Pair) -> None:
    prompts = [[1, 70, 8], [1, 5, 261, 44, 17]]
    made = generate(pair.ours, prompts, max_new_tokens=6, eos_token_ids=())
    for prompt, ours in zip(prompts, made, strict=True):
        theirs = pair.theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=6,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert list(ours.tokens) == theirs[0, len(prompt) :].tolist()


def test_a_body_computes_no_logits(llama: LanguageModel) -> None:
    from torch_watch import no_tensor_of

    with no_tensor_of(16, hf_folders.VOCAB):
        llama.hidden(IDS)
    with pytest.raises(AssertionError), no_tensor_of(16, hf_folders.VOCAB):
        dense(llama.head(llama.hidden(IDS)[0]))


def test_what_else_is_known_of_it(llama: LanguageModel) -> None:
    assert llama.max_length == 64
    assert llama.eos_token_ids == (2,)
    assert llama.name.startswith("llama")
    assert llama.tokenizer is not None
    assert (llama.tokenizer.bos_token_id, llama.tokenizer.eos_token_id) == (1, 2)


def test_text_in_text_out(llama: LanguageModel) -> None:
    assert llama.tokenizer is not None
    ids = llama.tokenizer.encode("what a thing, 你好")
    assert llama.tokenizer.decode(ids) == "what a thing, 你好"
    made = generate(llama, "what a thing", max_new_tokens=5, eos_token_ids=())
    assert made.text == llama.tokenizer.decode([*made.prompt_ids, *made.tokens])[12:]


def test_nothing_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_folders.write(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def connect(*args: Any) -> None:
        raise AssertionError(f"a connection to {args[1:]}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert open_model(tmp_path).head.vocab_size == hf_folders.VOCAB


def test_half_precision_stays(tmp_path: Path) -> None:
    model = hf_folders.make("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    hf_folders.write_tokenizer(tmp_path)
    opened = open_model(tmp_path)
    assert opened.head.weight.dtype == torch.bfloat16
    assert opened.hidden(IDS)[0].dtype == torch.bfloat16


def test_shards(tmp_path: Path) -> None:
    model = hf_folders.make("llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    hf_folders.write_tokenizer(tmp_path)
    hidden, _ = open_model(tmp_path).hidden(IDS)
    theirs = model.model(IDS).last_hidden_state
    assert_close(hidden, theirs, atol=1e-6)


# --- plain Llamas, without transformers -----------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_llama_needs_no_transformers(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = hf_folders.write(
        tmp_path, tie_word_embeddings=tied, num_key_value_heads=1, rope_theta=500.0
    )

    def gone() -> None:
        raise AssertionError("transformers was asked for")

    monkeypatch.setattr("lmhead.models.huggingface.transformers", gone)
    ours = open_model(tmp_path)
    assert isinstance(ours.body, LlamaBody)
    assert (ours.head.weight is ours.body.embedding.weight) == tied
    assert not any(p.requires_grad for p in (*ours.body.parameters(), *ours.head.parameters()))
    assert ours.max_length == 64
    hidden, _ = ours.hidden(IDS)
    assert_close(dense(ours.head(hidden)), logits_of(theirs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
    ],
    ids=str,
)
def test_other_llamas_are_left_to_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    theirs = hf_folders.write(tmp_path, **changes)
    ours = open_model(tmp_path)
    assert isinstance(ours.body, HuggingFaceBody)
    hidden, _ = ours.hidden(IDS)
    assert_close(dense(ours.head(hidden)), logits_of(theirs), atol=1e-5, rtol=1e-5)


def test_a_model_that_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    hf_folders.write(tmp_path)
    hf_folders.edit(tmp_path / "config.json", model_type="xlnet")
    with pytest.raises(ModelError, match=r"causal language model.*got 'xlnet'"):
        load_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("recurrent_gemma", {"lru_width": 16, "block_types": ["recurrent", "attention"]},
         "must return the cache"),
        ("electra", {"embedding_size": 16, "is_decoder": True}, "must be a linear layer"),
    ],
)  # fmt: skip
def test_an_unsupported_model_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    made = hf_folders.transformers
    config = made.AutoConfig.for_model(family, **hf_folders.SMALL | changes)
    made.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    hf_folders.write_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=message):
        open_model(tmp_path)


def test_llama_4(tmp_path: Path) -> None:
    changes = {"num_local_experts": 2, "intermediate_size_mlp": 24}
    config = hf_folders.transformers.AutoConfig.for_model(
        "llama4_text", **hf_folders.SMALL, **changes
    )
    torch.manual_seed(0)
    model = hf_folders.transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    hf_folders.write_tokenizer(tmp_path)
    ids = torch.tensor([[5, 9, 7]])
    with torch.no_grad():
        hidden, _ = load_huggingface(tmp_path).hidden(ids)
        theirs = model(input_ids=ids).logits
    assert_close(hidden @ model.lm_head.weight.T, theirs, atol=1e-5, rtol=1e-5)
