"""PEFT adapters on the output layer itself: PEFT's numbers and files, without the logits."""

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
from integrations.test_replace_head import ROWS, same_step, step
from integrations.tiny_hf import VOCAB, batch, tiny
from lmhead import LMHead

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*tie_word_embeddings.*", "ignore:.*tied.*", "ignore:.*save_embedding_layers.*"
)

CONFIGS: dict[str, Any] = {
    "lora on the body": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "lora": {"r": 4, "target_modules": ["q_proj", "lm_head"]},
    "lora dropout": {"r": 4, "target_modules": ["lm_head"], "lora_dropout": 0.5},
    "dora": {"r": 4, "target_modules": ["lm_head"], "use_dora": True},
    "dora dropout": {
        "r": 4,
        "target_modules": ["lm_head"],
        "use_dora": True,
        "lora_dropout": 0.5,
    },
    "modules_to_save": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trainable tokens": {
        "r": 4,
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"lm_head": [5, 9, 30]},
    },
}
TIED: dict[str, Any] = {
    "trainable tokens": {
        "r": 4,
        "target_modules": ["q_proj"],
        "trainable_token_indices": [5, 9, 30],
    },
    "modules_to_save": {
        "r": 4,
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "lora": {"r": 4, "target_modules": ["lm_head"]},
}


def adapted(family: str, options: dict[str, Any], order: str) -> Any:
    """A model with adapters that are not zero; order says where the head is replaced, if at all."""
    model = tiny(family)
    if order == "before":
        lmhead.replace_head(model)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(**copy.deepcopy(options)))
    for number, (name, p) in enumerate(sorted(model.named_parameters())):
        if "lora_" in name or "tokens_delta" in name:
            generator = torch.Generator().manual_seed(number)
            p.data.add_(torch.randn(p.shape, generator=generator), alpha=0.3)
    if order == "after":
        lmhead.replace_head(model)
    return model.train()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", CONFIGS)
def test_untied(name: str, order: str) -> None:
    ours, theirs = (adapted("llama", CONFIGS[name], o) for o in (order, "never"))
    if "dropout" not in name:
        same_step(ours, theirs)
        return
    found = []
    for model in (ours, theirs):
        torch.manual_seed(1)
        found.append(step(model))
    assert_close(found[0][0], found[1][0], rtol=1e-5)
    for key, gradient in found[1][1].items():
        assert_close(found[0][1][key], gradient, rtol=1e-4, atol=1e-5, what=key)
    torch.manual_seed(1)
    with no_tensor_of(ROWS - 3, VOCAB):
        step(ours)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", TIED)
def test_tied(name: str, order: str) -> None:
    ours, theirs = (adapted("llama tied", TIED[name], o) for o in (order, "never"))
    same_step(ours, theirs)


@pytest.mark.parametrize("name", ["lora", "dora", "modules_to_save", "trainable tokens"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_files_and_merging(name: str, order: str, tmp_path: Path) -> None:
    """Adapters are saved in PEFT's format, load into either model, and merge."""
    models = {kind: adapted("llama", CONFIGS[name], kind) for kind in (order, "never")}
    for kind, model in models.items():
        model.eval().save_pretrained(tmp_path / kind)
    ours, theirs = (load_file(tmp_path / k / "adapter_model.safetensors") for k in models)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    expected = step(models["never"])[0]
    again = peft.PeftModel.from_pretrained(lmhead.replace_head(tiny()), tmp_path / "never").eval()
    assert_close(again(**batch()).loss, expected, rtol=1e-5)
    stock = peft.PeftModel.from_pretrained(tiny(), tmp_path / order).eval()
    assert_close(stock(**batch()).loss, expected, rtol=1e-5)
    merged = models[order].merge_and_unload()
    assert isinstance(merged.lm_head, LMHead)
    assert_close(merged(**batch()).loss, expected, rtol=1e-5)
    assert not any("base_layer" in key for key in merged.state_dict())
    lmhead.restore_head(merged)
    assert_close(merged(**batch()).loss, expected, rtol=1e-5)


def test_restore_under_peft() -> None:
    ours, theirs = (adapted("llama", CONFIGS["lora"], o) for o in ("after", "never"))
    lmhead.restore_head(ours)
    assert str(ours) == str(theirs)
    assert_close(step(ours)[0], step(theirs)[0], rtol=1e-6)


def test_several_adapters_and_none() -> None:
    models = [adapted("llama", CONFIGS["lora"], order) for order in ("after", "never")]
    for model in models:
        torch.manual_seed(5)
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["lm_head"]))
        nn.init.normal_(model.get_base_model().lm_head.lora_B["other"].weight)
        model.base_model.set_adapter(["default", "other"])
    ours, theirs = models
    assert_close(ours(**batch()).loss, theirs(**batch()).loss, rtol=1e-5)
    with ours.disable_adapter(), theirs.disable_adapter():
        assert_close(ours(**batch()).loss, theirs(**batch()).loss, rtol=1e-5)
    for model in models:
        model.base_model.set_adapter("other")
    assert_close(ours(**batch()).loss, theirs(**batch()).loss, rtol=1e-5)


def test_half_precision_base_with_float32_adapters() -> None:
    losses = []
    for order in ("before", "never"):
        model = tiny().bfloat16()
        if order == "before":
            lmhead.replace_head(model)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, peft.LoraConfig(**CONFIGS["lora"]))
        nn.init.normal_(model.get_base_model().lm_head.lora_B["default"].weight, std=0.1)
        assert model.get_base_model().lm_head.lora_B["default"].weight.dtype == torch.float32
        losses.append(step(model)[0])
    assert_close(losses[0], losses[1], rtol=2e-2)


def test_from_linear_names_the_adapter() -> None:
    model = adapted("llama", CONFIGS["lora"], "never")
    layer = model.get_base_model().lm_head
    with pytest.raises(TypeError, match=r"got peft\..*Linear: an adapter .* lmhead.replace_head"):
        LMHead.from_linear(layer)


def test_other_adapters_are_refused() -> None:
    config = peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[])
    model = peft.get_peft_model(tiny(), config)
    with pytest.raises(TypeError, match=r"LoRA, DoRA, .*; got peft.tuners.ia3"):
        lmhead.replace_head(model)
