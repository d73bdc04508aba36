"""Replace `lm_head` in a Hugging Face model: same loss, same gradients, same tokens, no logits."""

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from lazy_and_dense import backward
from torch_watch import no_tensor_of

from lmhead import LMHead, PerformanceWarning

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(**{**SMALL, **options}, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


def gpt2(vocab_size: int = 61) -> Any:
    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def gemma2(**options: Any) -> Any:
    # A cap this low bends every logit, so that it cannot be forgotten unnoticed.
    config = transformers.Gemma2Config(**{**SMALL, **options}, final_logit_softcapping=0.2)
    return transformers.Gemma2ForCausalLM(config)


def cohere(**options: Any) -> Any:
    config = transformers.CohereConfig(**{**SMALL, **options}, logit_scale=0.25)
    return transformers.CohereForCausalLM(config)


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": llama,
    "gpt2": gpt2,
    "gemma2": gemma2,
    "cohere": cohere,
}
TIED = ["gpt2", "gemma2", "cohere"]


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model as it comes, and its twin with our head."""
    torch.manual_seed(0)
    theirs = FAMILIES[request.param]().double()
    ours = copy.deepcopy(theirs)
    ours.lm_head = LMHead.from_linear(ours.lm_head)
    return ours, theirs


def batch(vocab: int = 61, rows: int = 3, length: int = 10) -> tuple[Any, Any]:
    torch.manual_seed(1)
    input_ids = torch.randint(2, vocab, (rows, length))
    labels = input_ids.clone()
    labels[0, :4] = -100
    return input_ids, labels


def named_gradients(model: Any) -> dict[str, Any]:
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("items", [None, 40], ids=["mean", "num_items_in_batch"])
def test_loss_and_all_gradients_are_equal(pair: tuple[Any, Any], items: int | None) -> None:
    input_ids, labels = batch()
    losses = []
    for model in pair:
        loss = model(input_ids, labels=labels, num_items_in_batch=items).loss
        backward(loss)
        losses.append(loss)
    # Hugging Face converts the logits to float32 before the loss, whatever the model.
    assert_close(losses[0], losses[1], rtol=1e-6, dtype=losses[1].dtype)
    ours, theirs = (named_gradients(model) for model in pair)
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        assert_close(ours[name], expected, rtol=1e-4, atol=1e-7, what=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_allocates_no_logits(family: str) -> None:
    rows, length, vocab = 4, 128, 40_000
    model = FAMILIES[family](vocab_size=vocab)
    model.lm_head = LMHead.from_linear(model.lm_head)
    input_ids, labels = batch(vocab, rows, length)
    with no_tensor_of(rows * length, vocab):
        backward(model(input_ids, labels=labels).loss)
    assert model.lm_head.weight.grad is not None


def test_the_guard_sees_the_logits_of_the_original() -> None:
    input_ids, labels = batch()
    model = llama()
    with pytest.raises(AssertionError, match="allocated"), no_tensor_of(30, 61):
        model(input_ids, labels=labels)


@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_generation_gives_the_same_tokens(pair: tuple[Any, Any], use_cache: bool) -> None:
    prompt = batch()[0][:, :5]
    ours, theirs = (
        model.eval().generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=6,
            do_sample=False,
            use_cache=use_cache,
        )
        for model in pair
    )
    assert torch.equal(ours, theirs)


def test_sampled_generation_works(pair: tuple[Any, Any]) -> None:
    prompt = batch()[0][:, :5]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        torch.manual_seed(0)
        tokens = (
            pair[0]
            .eval()
            .generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=4,
                do_sample=True,
                temperature=0.8,
                top_k=20,
                top_p=0.9,
            )
        )
    assert tokens.shape == (3, 9)
    assert ((tokens >= 0) & (tokens < 61)).all()


@pytest.mark.parametrize("family", TIED)
def test_tied_embeddings_stay_tied(family: str) -> None:
    model = FAMILIES[family]()
    keys = set(model.state_dict())
    model.lm_head = LMHead.from_linear(model.lm_head)
    for other in (model, copy.deepcopy(model), model.double()):
        embedding = other.get_input_embeddings().weight
        assert other.lm_head.weight is embedding
        assert other.lm_head.weight.data_ptr() == embedding.data_ptr()
    assert set(model.state_dict()) == keys


def test_the_logits_of_the_output_answer_questions(pair: tuple[Any, Any]) -> None:
    input_ids, _ = batch()
    ours, theirs = (model.eval()(input_ids).logits for model in pair)
    assert ours.shape == theirs.shape
    picked = [
        z[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        for z in (ours, theirs)
    ]
    assert_close(picked[0], picked[1], rtol=1e-10)
    assert torch.equal(ours[:, -1].argmax(-1), theirs[:, -1].argmax(-1))
    assert torch.equal(ours[:, -1].topk(5).indices, theirs[:, -1].topk(5).indices)
