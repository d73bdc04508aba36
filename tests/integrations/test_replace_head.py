"""`replace_head` and `restore_head`: same numbers, same checkpoints, in every kind of model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import assert_close
from safetensors.torch import load_file
from torch import nn
from torch_watch import no_tensor_of

import lmhead
from integrations.tiny_hf import FAMILIES, SEQ2SEQ, VOCAB, batch, tiny, transformers
from lmhead import LMHead

ROWS = 3 * 9


def step(model: Any) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_step(ours: Any, theirs: Any, *, atol: float = 1e-5) -> None:
    """Compare loss and gradients of one step; ours must not build logits."""
    expected, gradients = step(theirs)
    with no_tensor_of(ROWS - 3, VOCAB):
        loss, found = step(ours)
    assert_close(loss, expected, rtol=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_close(found[name], gradient, rtol=1e-4, atol=atol, what=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients(family: str) -> None:
    model = tiny(family)
    assert lmhead.replace_head(model) is model
    assert isinstance(model.get_output_embeddings(), LMHead)
    same_step(model, tiny(family))


def test_the_guard_sees_the_logits_of_the_original() -> None:
    with pytest.raises(AssertionError, match="allocated"), no_tensor_of(ROWS - 3, VOCAB):
        step(tiny())


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_are_those_of_the_original(family: str, tmp_path: Path) -> None:
    ours, theirs = lmhead.replace_head(tiny(family)), tiny(family)
    for name, model in (("ours", ours), ("theirs", theirs)):
        model.save_pretrained(tmp_path / name)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    for key, tensor in files[1].items():
        assert torch.equal(files[0][key], tensor)
    assert (tmp_path / "ours/config.json").read_text() == (
        tmp_path / "theirs/config.json"
    ).read_text()
    again = type(theirs).from_pretrained(tmp_path / "ours")
    assert type(again.get_output_embeddings()) is nn.Linear
    same_step(lmhead.replace_head(again.eval()), theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_restore(family: str) -> None:
    model, theirs = lmhead.replace_head(tiny(family)), tiny(family)
    weight = model.get_output_embeddings().weight
    assert lmhead.restore_head(model) is model
    layer = model.get_output_embeddings()
    assert type(layer) is nn.Linear
    assert layer.weight is weight
    assert str(model) == str(theirs)
    assert list(model.state_dict()) == list(theirs.state_dict())
    assert_close(step(model)[0], step(theirs)[0], rtol=1e-6)
    assert "_get_resized_lm_head" not in model.__dict__


@pytest.mark.parametrize("family", ["llama", "llama tied", "bart", "t5", "t5 untied", "llava"])
@pytest.mark.parametrize("size", [VOCAB + 7, VOCAB - 5])
@pytest.mark.parametrize("first", ["resize", "replace"])
def test_resize(family: str, size: int, first: str) -> None:
    """The head stays one, before and after; new rows are drawn as in the original."""
    ours, theirs = tiny(family), tiny(family)
    if first == "replace":
        lmhead.replace_head(ours, softcap=None)
    for model in (ours, theirs):
        torch.manual_seed(3)
        model.resize_token_embeddings(size)
    if first == "resize":
        lmhead.replace_head(ours)
    head = ours.get_output_embeddings()
    assert isinstance(head, LMHead)
    assert (head.vocab_size, head.out_features) == (size, size)
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name
    tied = ours.get_input_embeddings().weight is head.weight
    assert tied == (theirs.get_input_embeddings().weight is theirs.get_output_embeddings().weight)
    ids = batch()
    ids = {name: t.clamp(max=size - 1) for name, t in ids.items()}
    assert_close(ours(**ids).loss, theirs(**ids).loss, rtol=1e-5)


def test_resize_keeps_options_and_low_rank() -> None:
    model = lmhead.replace_head(tiny(), softcap=9.0, grad_filter=0.01, max_bytes=2**20)
    model.lm_head.add_low_rank(2)
    nn.init.normal_(model.lm_head.low_rank_b)
    before = model.lm_head
    model.resize_token_embeddings(VOCAB + 3)
    head = model.lm_head
    assert (head.softcap, head.grad_filter, head.max_bytes) == (9.0, before.grad_filter, 2**20)
    assert head.low_rank_a is before.low_rank_a
    assert torch.equal(head.low_rank_b[:VOCAB], before.low_rank_b)
    assert not head.low_rank_b[VOCAB:].any()


def test_out_features_can_be_set() -> None:
    """As transformers does where weights are tied."""
    head = LMHead(4, 10)
    assert isinstance(head, nn.Linear)
    assert (head.in_features, head.out_features) == (4, 10)
    head.out_features = 12
    assert head.out_features == 12


def test_options_and_twice() -> None:
    model = lmhead.replace_head(tiny(), grad_filter=0.02, max_bytes=2**20)
    assert model.lm_head.grad_filter.tail_mass == 0.02
    assert model.lm_head.max_bytes == 2**20
    weight = model.lm_head.weight
    lmhead.replace_head(model)
    assert model.lm_head.grad_filter is None
    assert model.lm_head.weight is weight


def test_hooks_and_mode_are_kept() -> None:
    model = tiny()
    seen: list[Any] = []
    model.lm_head.register_forward_hook(lambda *args: seen.append(type(args[2]).__name__))
    lmhead.replace_head(model)
    assert not model.lm_head.training
    model(**batch())
    assert seen == ["LazyLogits"]


def test_inside_wrappers() -> None:
    """`torch.compile` and data-parallel wrappers hold the model as an attribute."""
    model = tiny()
    wrapped = nn.Module()
    wrapped.module = model
    outer = nn.Module()
    outer._orig_mod = wrapped
    lmhead.replace_head(outer)
    assert isinstance(model.lm_head, LMHead)


def test_accelerate_device_map_and_hooks(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    tiny().save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu").eval()
    accelerate.hooks.add_hook_to_module(model.lm_head, accelerate.hooks.AlignDevicesHook("cpu"))
    same_step(lmhead.replace_head(model), tiny())
    assert isinstance(model.lm_head._hf_hook, accelerate.hooks.AlignDevicesHook)
    lmhead.restore_head(model)
    assert isinstance(model.lm_head._hf_hook, accelerate.hooks.AlignDevicesHook)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    same_step(lmhead.replace_head(prepared), tiny())


def test_copies_are_independent() -> None:
    model = lmhead.replace_head(tiny("llama tied"))
    other = copy.deepcopy(model)
    other.resize_token_embeddings(VOCAB + 2)
    assert other.lm_head.vocab_size == VOCAB + 2
    assert model.lm_head.vocab_size == VOCAB
    assert other.lm_head.weight is other.get_input_embeddings().weight


# --- refusals -------------------------------------------------------------------------------------


def test_refuses_a_model_without_an_output_layer() -> None:
    with pytest.raises(TypeError, match=r"get_output_embeddings\(\) of LlamaModel returned None"):
        lmhead.replace_head(tiny().model)
    with pytest.raises(TypeError, match=r"must be a Hugging Face model.*got Linear"):
        lmhead.replace_head(nn.Linear(2, 3))


class Scaled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


def test_refuses_a_layer_that_is_not_linear() -> None:
    model = tiny()
    model.lm_head = Scaled(16, VOCAB)
    with pytest.raises(TypeError, match="Scaled computes something else"):
        lmhead.replace_head(model)
    model.lm_head = nn.Conv1d(16, VOCAB, 1)
    with pytest.raises(TypeError, match=r"must be an nn.Linear; got torch.*Conv1d"):
        lmhead.replace_head(model)


def test_refuses_weights_that_are_not_there() -> None:
    model = tiny()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(TypeError, match="must be a parameter"):
        lmhead.replace_head(model)
    model = tiny()
    model.lm_head.weight = nn.Parameter(torch.zeros(VOCAB, 16, dtype=torch.int8), False)
    with pytest.raises(ValueError, match=r"torch.int8 \(quantized\?\)"):
        lmhead.replace_head(model)
    hooks = pytest.importorskip("accelerate").hooks
    model = tiny()
    hook = hooks.AlignDevicesHook("cpu", offload=True, weights_map=model.lm_head.state_dict())
    hooks.add_hook_to_module(model.lm_head, hook)
    with pytest.raises(ValueError, match="accelerate offloads it"):
        lmhead.replace_head(model)


def test_restore_refuses_what_a_linear_layer_cannot_do() -> None:
    model = lmhead.replace_head(tiny(), softcap=3.0)
    with pytest.raises(ValueError, match=r"cannot do what this head does.*softcap=3.0"):
        lmhead.restore_head(model)
    model = lmhead.replace_head(tiny())
    head = model.lm_head.add_low_rank(2)
    nn.init.normal_(head.low_rank_b)
    with pytest.raises(ValueError, match="merge_low_rank"):
        lmhead.restore_head(model)
    before = step(model)[0]
    head.merge_low_rank()
    assert_close(step(lmhead.restore_head(model))[0], before, rtol=1e-5)


@pytest.mark.parametrize("family", sorted(SEQ2SEQ))
def test_seq2seq_generation(family: str) -> None:
    ids = batch()["input_ids"]
    ours, theirs = (
        model.generate(ids, max_new_tokens=6, num_beams=3, do_sample=False)
        for model in (lmhead.replace_head(tiny(family)), tiny(family))
    )
    assert torch.equal(ours, theirs)


def test_multimodal_inputs() -> None:
    """Images and text: the same loss."""
    ids = torch.tensor([[1, 3, 3, 3, 3, 9, 12, 7, 2]])
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    losses = [
        model(input_ids=ids, pixel_values=pixels, labels=ids).loss
        for model in (lmhead.replace_head(tiny("llava")), tiny("llava"))
    ]
    assert_close(losses[0], losses[1], rtol=1e-5)
