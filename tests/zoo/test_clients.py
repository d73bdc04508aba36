"""The functions of TRL, transformers, lm-eval, torchmetrics, Lightning and PEFT themselves."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor, nn

from lmhead import LMHead
from zoo.agreement import agree
from zoo.catalogue import Batch, Sizes, Snippet, run
from zoo.tiny_llama import llama, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
SIZES = Sizes()


def compare(function: Callable[[Any, Batch], Any], *, grad: bool = True, two: bool = False) -> None:
    """As the snippets of the catalogue, with a function of a package inside."""
    entry = Snippet("client", function, grad, None, None, two)
    for dtype, max_bytes in (
        (torch.float64, None),
        (torch.float64, 3 * 8 * SIZES.V),
        (torch.float32, None),
    ):
        truth = run(entry, SIZES, torch.float64, lazy=False)
        plain = run(entry, SIZES, dtype, lazy=False)
        agree(run(entry, SIZES, dtype, lazy=True, max_bytes=max_bytes), plain, truth, dtype)


def package(name: str) -> Any:
    """A module, without the warnings of its import; the test is skipped if it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed (extra: clients)")


# --- TRL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("several", [False, True])
def test_trl_selective_log_softmax(temperature: float, several: bool) -> None:
    utils = package("trl.trainer.utils")

    def function(z: Any, x: Batch) -> Any:
        index = torch.stack([x.ids, x.ids.flip(0)], -1) if several else x.ids
        return utils.selective_log_softmax(z, index, temperature=temperature)

    compare(function)


def test_trl_selective_log_softmax_of_half_precision() -> None:
    """Its other branch: a loop of `log_softmax` over the rows."""
    utils = package("trl.trainer.utils")
    torch.manual_seed(0)
    linear = nn.Linear(16, 301, bias=False, dtype=torch.bfloat16)
    hidden, ids = torch.randn(3, 5, 16, dtype=torch.bfloat16), torch.randint(301, (3, 5))
    truth = torch.log_softmax(hidden.double() @ linear.weight.double().T, -1)
    truth = truth.gather(-1, ids[..., None]).squeeze(-1)
    plain = utils.selective_log_softmax(linear(hidden), ids)
    ours = utils.selective_log_softmax(LMHead.from_linear(linear)(hidden), ids)
    assert ours.shape == plain.shape
    error = (plain.double() - truth).abs().max()
    assert (ours.double() - truth).abs().max() <= error + 2**-8


@pytest.mark.parametrize("chunk", [128, 5])
def test_trl_entropy_from_logits(chunk: int) -> None:
    utils = package("trl.trainer.utils")
    compare(lambda z, _: utils.entropy_from_logits(z, chunk_size=chunk))


@pytest.mark.parametrize("with_gradient", [True, False])
def test_trl_log_probs_and_entropy(with_gradient: bool) -> None:
    utils = package("trl.trainer.utils")
    if not hasattr(utils, "selective_log_softmax_and_entropy"):
        pytest.skip("this TRL has no selective_log_softmax_and_entropy")
    compare(
        lambda z, x: utils.selective_log_softmax_and_entropy(
            z, x.ids, entropy_requires_grad=with_gradient, temperature=0.9, row_mask=x.mask
        )
    )


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduction", ["batchmean", "sum", "mean", "none"])
@pytest.mark.parametrize("masked", [True, False])
def test_trl_generalized_jsd(beta: float, reduction: str, masked: bool) -> None:
    gkd = package("trl.experimental.gkd")

    def function(z: Any, x: Batch) -> Any:
        return gkd.GKDTrainer.generalized_jsd_loss(
            z,
            x.other,
            labels=x.labels if masked else None,
            beta=beta,
            temperature=0.9,
            reduction=reduction,
        )

    compare(function, two=True)


@pytest.mark.parametrize("trainer", ["cpo.CPOTrainer", "orpo.ORPOTrainer"])
@pytest.mark.parametrize("average", [True, False])
def test_trl_batch_log_probs(trainer: str, average: bool) -> None:
    module, name = trainer.split(".")
    owner = getattr(package(f"trl.experimental.{module}"), name)
    compare(lambda z, x: owner.get_batch_logps(z, x.labels, average_log_prob=average))


# --- transformers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [None, 13])
def test_transformers_causal_lm_loss(items: int | None) -> None:
    losses = package("transformers.loss.loss_utils")
    compare(lambda z, x: losses.ForCausalLMLoss(z, x.labels, x.V, num_items_in_batch=items))


@pytest.mark.parametrize("shift", [True, False])
def test_transformers_label_smoother(shift: bool) -> None:
    utils = package("transformers.trainer_pt_utils")
    smoother = utils.LabelSmoother(epsilon=0.1)
    compare(lambda z, x: smoother({"logits": z}, x.labels, shift_labels=shift))


PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "min_length": lambda t: t.MinLengthLogitsProcessor(20, eos_token_id=3),
    "min_new_tokens": lambda t: t.MinNewTokensLengthLogitsProcessor(2, 20, eos_token_id=3),
    "temperature": lambda t: t.TemperatureLogitsWarper(0.7),
    "repetition": lambda t: t.RepetitionPenaltyLogitsProcessor(penalty=1.3),
    "encoder_repetition": lambda t: t.EncoderRepetitionPenaltyLogitsProcessor(
        1.2, torch.arange(12).view(4, 3)
    ),
    "top_p": lambda t: t.TopPLogitsWarper(0.8),
    "top_k": lambda t: t.TopKLogitsWarper(5),
    "min_p": lambda t: t.MinPLogitsWarper(0.1),
    "typical": lambda t: t.TypicalLogitsWarper(0.7),
    "epsilon": lambda t: t.EpsilonLogitsWarper(0.02),
    "eta": lambda t: t.EtaLogitsWarper(0.03, device="cpu"),
    "no_repeat_ngram": lambda t: t.NoRepeatNGramLogitsProcessor(2),
    "encoder_no_repeat_ngram": lambda t: t.EncoderNoRepeatNGramLogitsProcessor(
        1, torch.arange(12).view(4, 3)
    ),
    "sequence_bias": lambda t: t.SequenceBiasLogitsProcessor({(3,): 1.5, (7, 8): -2.0}),
    "bad_words": lambda t: t.NoBadWordsLogitsProcessor([[5], [6, 7]], eos_token_id=3),
    "prefix": lambda t: t.PrefixConstrainedLogitsProcessor(lambda i, _: [i, 5, 9], 1),
    "forced_bos": lambda t: t.ForcedBOSTokenLogitsProcessor(4),
    "forced_eos": lambda t: t.ForcedEOSTokenLogitsProcessor(7, 3, device="cpu"),
    "inf_nan": lambda t: t.InfNanRemoveLogitsProcessor(),
    "exponential_decay": lambda t: t.ExponentialDecayLengthPenalty((2, 1.05), 3, 0),
    "normalization": lambda t: t.LogitNormalization(),
    "suppress_at_begin": lambda t: t.SuppressTokensAtBeginLogitsProcessor([3, 4], 6),
    "suppress": lambda t: t.SuppressTokensLogitsProcessor([3, 4]),
    "watermark": lambda t: t.WatermarkLogitsProcessor(37, "cpu", greenlist_ratio=0.3),
    "guidance": lambda t: t.ClassifierFreeGuidanceLogitsProcessor(2.0),
}
SORTS = {"top_p", "typical"}


@pytest.mark.parametrize("name", PROCESSORS)
def test_transformers_processor(name: str) -> None:
    """Values of the scores that a processor returns, and what the next step asks of them."""
    package("transformers")
    from transformers.generation import logits_process

    def function(z: Any, x: Batch) -> Any:
        processor = PROCESSORS[name](logits_process)
        scores = processor(x.ids[: x.B // 2] if name == "guidance" else x.ids, z[:, -1, :])
        return scores, scores.argmax(-1), scores.softmax(-1), scores.log_softmax(-1)

    with warnings.catch_warnings():
        if name in SORTS:
            warnings.simplefilter("ignore")
        compare(function, grad=False)


# --- lm-eval --------------------------------------------------------------------------------------


def evaluator(model: Any) -> Any:
    huggingface = package("lm_eval.models.huggingface")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return huggingface.HFLM(
            pretrained=model, tokenizer=tokenizer(), batch_size=2, max_length=24, device="cpu"
        )


def request(kind: str, *arguments: Any) -> Any:
    instance = package("lm_eval.api.instance")
    return instance.Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_log_likelihood() -> None:
    requests = [
        request("loglikelihood", f"t{a} t{b}", f" t{c} t{d}")
        for a, b, c, d in [
            (5, 9, 7, 11),
            (8, 8, 13, 6),
            (21, 4, 4, 30),
            (5, 9, 7, 12),
            (9, 9, 9, 9),
        ]
    ]
    theirs, ours = (evaluator(llama(kind)).loglikelihood(requests) for kind in ("dense", "lazy"))
    for (a, greedy_a), (b, greedy_b) in zip(ours, theirs, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert greedy_a == greedy_b


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_greedy_answers_are_recognised() -> None:
    """A continuation that is the model's own is greedy, for both."""
    model = llama("dense")
    prompt = torch.tensor([[5, 9, 8]])
    out = model.generate(prompt, max_new_tokens=2, do_sample=False, pad_token_id=0)[0, 3:].tolist()
    asked = [request("loglikelihood", "t5 t9 t8", "".join(f" t{i}" for i in out))]
    for kind in ("dense", "lazy"):
        assert evaluator(llama(kind)).loglikelihood(asked)[0][1] is True


@pytest.mark.filterwarnings("ignore")
def test_lm_eval_rolling_log_likelihood() -> None:
    text = " ".join(f"t{(7 * i) % 50 + 4}" for i in range(40))
    asked = [request("loglikelihood_rolling", text)]
    theirs, ours = (evaluator(llama(k)).loglikelihood_rolling(asked) for k in ("dense", "lazy"))
    assert_close(ours[0], theirs[0], rtol=1e-5)


# --- torchmetrics and Lightning -------------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [None, -100])
def test_torchmetrics_perplexity(ignore_index: int | None) -> None:
    text = package("torchmetrics.functional.text")
    compare(
        lambda z, x: text.perplexity(
            z, x.ids if ignore_index is None else x.labels, ignore_index=ignore_index
        ),
        grad=False,
    )


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer(tmp_path: Any) -> None:
    """Two epochs of a `LightningModule`: the same weights as with `nn.Linear`."""
    lightning = package("lightning")

    class Model(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, kind: str) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Embedding(50, 8)
            linear = nn.Linear(8, 50)
            self.head = linear if kind == "dense" else LMHead.from_linear(linear)

        def training_step(self, batch: Any, _: int) -> Any:
            (ids,) = batch
            logits = self.head(torch.tanh(self.body(ids[:, :-1])))
            self.log("accuracy", (logits.argmax(-1) == ids[:, 1:]).float().mean())
            return torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    data = torch.randint(50, (8, 6), generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4)
    weights = []
    for kind in ("dense", "lazy"):
        model = Model(kind)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, loader)
        weights.append(model.state_dict())
    for name, expected in weights[0].items():
        assert_close(weights[1][name], expected, atol=1e-5, what=name)


# --- PEFT -----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save_head", [False, True])
def test_peft_adapters_in_the_body(save_head: bool) -> None:
    """LoRA in the attention; with `modules_to_save` the head is trained beside it."""
    peft = package("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"] * save_head or None
    )
    ids = torch.randint(4, 60, (3, 7), generator=torch.Generator().manual_seed(0))
    found = []
    for kind in ("dense", "lazy"):
        torch.manual_seed(0)
        model = peft.get_peft_model(llama(kind), copy.deepcopy(config))
        for name, p in sorted(model.named_parameters()):
            if "lora_B" in name:
                nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(5))
            if "lora_A" in name:
                nn.init.normal_(p, std=0.5, generator=torch.Generator().manual_seed(6))
        loss = model(ids, labels=ids).loss
        loss.backward()
        found.append((loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert_close(found[1][0], found[0][0], rtol=1e-5)
    assert found[1][1].keys() == found[0][1].keys()
    assert any("lm_head" in name for name in found[0][1]) == save_head
    for name, expected in found[0][1].items():
        assert_close(found[1][1][name], expected, rtol=1e-3, atol=1e-5, what=name)


@pytest.mark.filterwarnings("ignore")
def test_accelerate_gathers_predictions() -> None:
    """`gather_for_metrics` and `pad_across_processes` of a prediction loop, on one process."""
    accelerate = package("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    ids = torch.randint(4, 60, (3, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs, ours = (llama(kind)(ids).logits for kind in ("dense", "lazy"))
    for z in (theirs, ours):
        z.gathered = accelerator.gather_for_metrics(accelerator.pad_across_processes(z, dim=1))
    assert torch.equal(ours.gathered.argmax(-1), theirs.gathered.argmax(-1))
    assert_close(Tensor(ours.gathered.float().cpu().numpy()), theirs.gathered, rtol=1e-4, atol=1e-4)
