"""TRL's own trainers, stock against patched: losses, metrics, weights, and what they allocate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_watch
from compare import assert_close
from torch import nn
from torch_watch import no_tensor_of

import lmhead
from integrations.tiny_hf import WIDE_VOCAB, batch, tiny, wide
from integrations.trl_runs import KINDS, Run, train, trl
from lmhead import LMHead
from lmhead.integrations import trl as patched_trl

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    yield
    patched_trl.unpatch()


def same_run(ours: Run, theirs: Run, *, atol: float = 1e-5) -> None:
    assert len(ours.logs) == len(theirs.logs) >= 5
    for step, (mine, yours) in enumerate(zip(ours.logs, theirs.logs, strict=True)):
        assert mine.keys() == yours.keys()
        tie = abs(yours.get("rewards/margins", 1.0)) < 1e-6  # rounding decides which is larger
        for key, value in yours.items():
            if key == "rewards/accuracies" and tie:
                continue
            if isinstance(value, float) and math.isnan(value):
                assert math.isnan(mine[key]), (step, key)
            else:
                assert mine[key] == pytest.approx(value, rel=1e-5, abs=atol), (step, key)
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        assert_close(ours.weights[name], weight, rtol=1e-5, atol=atol, what=name)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "gkd"])
def test_five_steps_are_those_of_stock_trl(name: str, tmp_path: Path) -> None:
    theirs = train(name, tmp_path / "stock")
    with patched_trl.patch():
        ours = train(name, tmp_path / "patched")
    same_run(ours, theirs)


def test_gkd_on_lazy_logits(tmp_path: Path) -> None:
    """It computes from logits: with `replace_head` on student and teacher they stay lazy."""
    theirs = train("gkd", tmp_path / "stock")
    same_run(train("gkd", tmp_path / "lazy", prepare=lmhead.replace_head), theirs)


# --- the functions themselves ---------------------------------------------------------------------

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def problem(n: int = 37, *, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(n)
    hidden = torch.randn(n, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(301, 16, dtype=dtype, requires_grad=True)
    shift = torch.randn(301, dtype=dtype, requires_grad=True) if bias else None
    targets = (hidden.detach() @ weight.detach().T).argmax(-1)
    targets[::2] = torch.randint(301, targets[::2].shape)
    return hidden, weight, shift, targets


def outcome(function: Any, case: Any, options: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    hidden, weight, bias, targets = case
    out = function.apply(hidden, weight, bias, targets, *options)
    g = torch.Generator().manual_seed(0)
    total = sum(
        (x * torch.rand(x.shape, generator=g)).sum()
        for x in out
        if x is not None and x.requires_grad
    )
    inputs = [t for t in (hidden, weight, bias) if t is not None]
    return out, list(torch.autograd.grad(total, inputs))


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("outputs", [(), ("log_probs", "entropy"), OUTPUTS])
def test_log_probs(
    softcap: float | None, scale: float, temperature: float, outputs: tuple[str, ...]
) -> None:
    from trl.kernels import ChunkedLogProbFunction

    options = (temperature, 100, softcap, scale, outputs)
    for bias in (True, False):
        case = problem(bias=bias)
        expected, gradients = outcome(ChunkedLogProbFunction, case, options)
        with patched_trl.patch():
            found, ours = outcome(trl.trainer.utils._ChunkedLogProbFunction, case, options)
        assert [x is None for x in found] == [x is None for x in expected]
        assert [x is not None and x.requires_grad for x in found] == [
            x is not None and x.requires_grad for x in expected
        ]
        for mine, yours in zip([*found, *ours], [*expected, *gradients], strict=True):
            if yours is not None:
                assert_close(mine, yours, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("weighting", "first", "later"), [("equal", 3, 3), ("rows", 6, 4)])
def test_products_of_summed_and_weighted_log_probs(weighting: str, first: int, later: int) -> None:
    """Gradients are made ahead, until a step has shown that rows are weighted."""
    from trl.kernels import ChunkedLogProbFunction

    hidden, weight, _, targets = problem(128, bias=False)
    by = torch.rand(128) if weighting == "rows" else torch.ones(128)
    layer = nn.Linear(1, 1)
    found: list[Any] = []

    def step(function: Any) -> None:
        out = function.apply(hidden, weight, None, targets, 1.0, 100, None, 1.0, OUTPUTS)
        found[:] = [*out, *torch.autograd.grad((out[0] * by).sum() / 7, [hidden, weight])]

    step(ChunkedLogProbFunction)
    expected = list(found)
    with patched_trl.patch():
        ours: Any = trl.trainer.utils._ChunkedLogProbFunction
        before = patched_trl._layer.set(layer)
        for products in (first, later):
            made = torch_watch.count_products(lambda: step(ours), 128, 16, 301)
            assert made == pytest.approx(products, rel=0.05)
            for mine, yours in zip(found, expected, strict=True):
                assert_close(mine, yours, rtol=1e-5, atol=2e-5)
        patched_trl._layer.reset(before)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_divergence(beta: float, softcap: float | None) -> None:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    hidden, weight, bias, _ = problem()
    teacher, other, *_ = problem(n=38)
    arguments = (hidden, weight, bias, teacher[:37].detach(), other.detach(), None)
    options = (beta, 0.8, 0.5, softcap, 1.0, None)

    def run(function: Any) -> list[Any]:
        value, entropy = function.apply(*arguments, *options)
        assert not entropy.requires_grad
        return [value, entropy, *torch.autograd.grad(value.square().sum(), [hidden, weight, bias])]

    expected = run(ChunkedDivergenceFunction)
    with patched_trl.patch():
        found = run(trl.trainer.distillation_trainer.ChunkedDivergenceFunction)
    for mine, yours in zip(found, expected, strict=True):
        assert_close(mine, yours, rtol=1e-4, atol=2e-5)


def fused(model: Any, inputs: Any, **options: Any) -> Any:
    trl.trainer.utils.add_fused_lm_head(model, outputs=OUTPUTS, **options)
    return model(**inputs, fused_lm_head=True)


def test_all_positions_ignored() -> None:
    inputs = {**batch(), "labels": torch.full((3, 9), -100)}
    with patched_trl.patch():
        model = tiny()
        out = fused(model, inputs)
        out.loss.backward()
    assert not out.label_mask.any()
    for value in (out.loss, out.log_probs, out.entropy):
        assert not value.any()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_ignored_rows_cost_nothing() -> None:
    """Only the positions that count are swept."""
    inputs = batch(4, 30)
    inputs["labels"][:, :-2] = -100
    with patched_trl.patch(), no_tensor_of(4 * 10, WIDE_VOCAB):
        fused(wide(), inputs).loss.backward()


def test_bfloat16_and_autocast() -> None:
    for autocast in (False, True):
        model = tiny() if autocast else tiny().bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            theirs = fused(tiny() if autocast else tiny().bfloat16(), batch())
            with patched_trl.patch():
                ours = fused(model, batch())
        assert ours.log_probs.dtype == theirs.log_probs.dtype == torch.float32
        assert_close(ours.log_probs, theirs.log_probs, rtol=2e-2, atol=5e-2)
        ours.loss.backward()
        assert model.lm_head.weight.grad.dtype == model.lm_head.weight.dtype


def test_gradient_filter() -> None:
    """The filter changes gradients a little, and no values."""
    torch.manual_seed(0)
    hidden, targets = torch.randn(600, 16), torch.randint(4000, (600,))
    weight = (2 * torch.randn(4000, 16)).requires_grad_()
    found = []
    for tail in (None, 0.05):
        with patched_trl.patch(grad_filter=tail):
            function = trl.trainer.utils._ChunkedLogProbFunction
            outputs = ("log_probs", "entropy", "is_top1")
            log_probs = function.apply(hidden, weight, None, targets, 1.0, 1, None, 1.0, outputs)[0]
        found.append((log_probs.detach(), *torch.autograd.grad(log_probs.sum(), weight)))
    (expected, exact), (same, filtered) = found
    assert_close(same, expected, rtol=1e-5)
    error = float((exact - filtered).norm() / exact.norm())
    assert 1e-3 < error < 0.1


# --- heads that are more than a weight ------------------------------------------------------------


def reference(model: Any, inputs: Any) -> Any:
    """The loss of the model's own forward pass."""
    return model(**inputs).loss


HEADS = {
    "softcap": lambda model: lmhead.replace_head(model, softcap=3.0),
    "scale": lambda model: lmhead.replace_head(model, scale=0.5),
    "low rank": lambda model: low_rank(lmhead.replace_head(model)),
}


def low_rank(model: Any) -> Any:
    nn.init.normal_(model.lm_head.add_low_rank(3).low_rank_b)
    return model


@pytest.mark.parametrize("name", HEADS)
def test_the_patch_respects_the_head(name: str) -> None:
    model = HEADS[name](tiny())
    expected = reference(model, batch())
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    with patched_trl.patch():
        loss = fused(model.train(), batch()).loss
        loss.backward()
    assert_close(loss, expected, rtol=1e-5)
    for key, parameter in model.named_parameters():
        assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-5, what=key)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("trainer", ["sft", "distillation"])
def test_without_the_patch_such_a_head_is_an_error(name: str, trainer: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"would ignore what LMHead.*trl.patch\(\)"):
        train(trainer, tmp_path, prepare=HEADS[name])


def test_distillation_respects_the_head(tmp_path: Path) -> None:
    runs = []
    for prepare in (lambda model: model, HEADS["softcap"]):
        with patched_trl.patch():
            runs.append(train("distillation", tmp_path, prepare=prepare))
    assert runs[0].logs[0]["entropy"] < runs[1].logs[0]["entropy"]


def test_a_plain_head_needs_no_patch(tmp_path: Path) -> None:
    theirs = train("sft", tmp_path / "stock")
    same_run(train("sft", tmp_path / "lazy", prepare=lmhead.replace_head), theirs)


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.0}


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", ["sft", "dpo", "kto", "grpo", "rloo", "distillation"])
def test_lora_on_the_head_is_trained(name: str, dora: bool, tmp_path: Path) -> None:
    config = peft.LoraConfig(**LORA, use_dora=dora)
    with pytest.raises(ValueError, match="Applying a PEFT adapter to `lm_head` is not supported"):
        train(name, tmp_path / "stock", peft_config=config)
    with patched_trl.patch():
        run = train(name, tmp_path / "patched", peft_config=config)
    assert run.weights["base_model.model.lm_head.lora_B.default.weight"].abs().sum() > 0
    assert torch.equal(
        run.weights["base_model.model.lm_head.base_layer.weight"], tiny().lm_head.weight
    )


@pytest.mark.parametrize("dora", [False, True])
def test_lora_on_the_head_gives_the_loss_of_the_logits(dora: bool) -> None:
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny(), peft.LoraConfig(**LORA, use_dora=dora))
    base = model.get_base_model()
    nn.init.normal_(base.lm_head.lora_B["default"].weight, std=0.3)
    expected = reference(model, batch())
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with patched_trl.patch():
        loss = fused(base, batch()).loss
        loss.backward()
    assert_close(loss, expected, rtol=1e-5)
    for key, parameter in model.named_parameters():
        if key in gradients:
            assert_close(parameter.grad, gradients[key], rtol=1e-4, atol=1e-5, what=key)


# --- the patch itself -----------------------------------------------------------------------------


def test_unpatch_restores_everything() -> None:
    def state() -> list[Any]:
        modules = [trl.trainer.utils, trl.trainer.distillation_trainer, trl.trainer.sft_trainer]
        return [dict(vars(module)) for module in modules]

    before = state()
    with patched_trl.patch():
        assert trl.trainer.sft_trainer.add_fused_lm_head is not before[2]["add_fused_lm_head"]
        patched_trl.patch()  # twice is once
    assert state() == before


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "__version__", "1.17.0")
    with pytest.raises(RuntimeError, match=r"tested with TRL 1\.16\.0; installed is 1\.17\.0"):
        patched_trl.patch()


def test_the_signature_stays_that_of_the_model() -> None:
    """`generate` and data collators look at it."""
    with patched_trl.patch():
        model = tiny()
        before = inspect.signature(model.forward)
        trl.trainer.utils.add_fused_lm_head(model)
        assert inspect.signature(model.forward) == before


def test_without_its_adapters_a_head_in_half_precision_scores_the_same() -> None:
    """The reference pass of a policy that has not moved: a ratio of exactly 1."""
    model = peft.get_peft_model(tiny().bfloat16(), peft.LoraConfig(**LORA))
    base = model.get_base_model()
    with patched_trl.patch(), torch.no_grad():
        policy = fused(base, batch())
        with model.disable_adapter():
            reference = model(**batch(), fused_lm_head=True)
    assert torch.equal(policy.log_probs, reference.log_probs)


def test_generation_is_untouched() -> None:
    ids = batch()["input_ids"]
    expected = tiny().generate(ids, max_new_tokens=5, do_sample=False)
    with patched_trl.patch():
        model = tiny()
        trl.trainer.utils.add_fused_lm_head(model)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
        assert not isinstance(model.lm_head, LMHead)


def test_verl_arguments_and_gradients() -> None:
    from lmhead.integrations.verl import FusedLinearForPPO

    hidden, weight, _, targets = problem(36, bias=False)
    shaped = hidden.view(4, 9, 16), targets.view(4, 9)
    log_probs, entropy = FusedLinearForPPO()(shaped[0], weight, shaped[1], temperature=0.7)
    z = (shaped[0] @ weight.T / 0.7).log_softmax(-1)
    expected = z.gather(-1, shaped[1][..., None])[..., 0], -(z.exp() * z).sum(-1)
    assert_close(log_probs, expected[0], rtol=1e-5, atol=1e-5)
    assert_close(entropy, expected[1], rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad((log_probs * 2 + entropy).sum(), [hidden, weight])
    theirs = torch.autograd.grad((expected[0] * 2 + expected[1]).sum(), [hidden, weight])
    for mine, yours in zip(ours, theirs, strict=True):
        assert_close(mine, yours, rtol=1e-4, atol=1e-4)
