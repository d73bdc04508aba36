"""`lmhead.losses` against TRL's own loss functions, values and gradients."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from compare import assert_close
from torch import Tensor

import lmhead
from lmhead import losses

pytest.importorskip("trl", reason="TRL is not installed")


def trainer(**attributes: Any) -> Any:
    """The `self` of a trainer's loss method: what the formula reads, and mocks for its metrics."""
    made = MagicMock()
    made.accelerator.device = "cpu"
    made.accelerator.gather_for_metrics = made.accelerator.gather = lambda x: x
    made.accelerator.reduce = lambda x, **_: x
    made.model.training = True
    made.aux_loss_enabled = False
    made._metrics = defaultdict(lambda: defaultdict(list))
    made._tp_size, made._total_train_tokens = 1, 0
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Batch:
    """Four sequences of unequal length: two chosen, two rejected."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.mask = torch.tensor(
            [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
        )

        def log_probs() -> Tensor:
            return -torch.rand(4, 5, generator=random) * 3 * self.mask

        self.policy = log_probs().requires_grad_()
        self.old, self.reference = log_probs(), log_probs()
        self.old = self.policy.detach() + 0.3 * (self.old - self.old.mean()) * self.mask
        self.advantages = torch.tensor([1.0, -0.5, 0.7, -1.2])

    def sums(self, log_prob: Tensor, *, mean: bool = False) -> tuple[Tensor, ...]:
        return losses.sequence_log_prob(log_prob, self.mask, mean=mean).chunk(2)

    def same(self, ours: Tensor, theirs: Tensor) -> None:
        """The losses are equal, and so are their gradients by the log-probabilities."""
        assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        found, expected = (
            torch.autograd.grad(x, self.policy, retain_graph=True)[0] for x in (ours, theirs)
        )
        assert float(expected.abs().sum()) > 0
        assert_close(found, expected, rtol=1e-5, atol=1e-7, what="gradient")


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_and_ipo(kind: str) -> None:
    from trl import DPOTrainer

    batch = Batch()
    # TRL's mask has one position more in front; its log-probabilities are of the positions after.
    mask = torch.cat([torch.zeros(4, 1, dtype=torch.long), batch.mask], 1)
    outputs = SimpleNamespace(
        log_probs=batch.policy * batch.mask,
        entropy=torch.zeros(4, 5),
        mean_logits=torch.zeros(4, 5),
        is_top1=torch.zeros(4, 5, dtype=torch.bool),
    )
    ref = batch.reference.sum(1).chunk(2)
    stub = trainer(
        loss_types=[kind],
        loss_weights=[1.0],
        beta=0.3,
        ld_alpha=None,
        use_weighting=False,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        label_smoothing=0.0,
    )
    inputs = {
        "input_ids": torch.ones(4, 6, dtype=torch.long),
        "attention_mask": torch.ones(4, 6),
        "completion_mask": mask,
        "ref_chosen_logps": ref[0],
        "ref_rejected_logps": ref[1],
    }
    theirs = DPOTrainer._compute_loss(stub, lambda **_: outputs, inputs, return_outputs=False)
    mean = kind == "ipo"
    function = losses.ipo if mean else losses.dpo
    ours = function(
        *batch.sums(batch.policy, mean=mean), *batch.sums(batch.reference, mean=mean), beta=0.3
    )
    batch.same(ours.mean(), theirs)


def test_kto() -> None:
    from trl import KTOTrainer

    batch = Batch()
    outputs = SimpleNamespace(
        log_probs=batch.policy * batch.mask,
        entropy=torch.zeros(4, 5),
        mean_logits=torch.zeros(4, 5),
    )
    mask = torch.cat([torch.zeros(4, 1, dtype=torch.long), batch.mask], 1)
    desirable = torch.tensor([True, False, True, True])
    kl_logps, ref_kl_logps = torch.tensor([-3.0, -2.0]), torch.tensor([-3.4, -2.5])
    stub = trainer(
        loss_type="kto",
        beta=0.2,
        desirable_weight=1.3,
        undesirable_weight=0.7,
        precompute_ref_logps=True,
        calculate_KL=True,
        _compute_kl_logps=lambda *_: kl_logps,
    )
    inputs = {
        "input_ids": torch.ones(4, 6, dtype=torch.long),
        "completion_input_ids": torch.ones(4, 6, dtype=torch.long),
        "attention_mask": torch.ones(4, 6),
        "completion_mask": mask,
        "label": desirable,
        "ref_logps": batch.reference.sum(1),
        "ref_KL_logps": ref_kl_logps,
    }
    theirs = KTOTrainer._compute_loss(stub, lambda **_: outputs, inputs, return_outputs=False)
    ours = losses.kto(
        (batch.policy * batch.mask).sum(1),
        batch.reference.sum(1),
        desirable,
        kl=(kl_logps - ref_kl_logps).mean(),
        beta=0.2,
        desirable_weight=1.3,
        undesirable_weight=0.7,
    )
    batch.same(ours.mean(), theirs)


def test_orpo() -> None:
    from trl.experimental.orpo import ORPOTrainer

    batch = Batch()
    chosen, rejected = batch.sums(batch.policy, mean=True)
    nll = -chosen.mean()
    ratio = ORPOTrainer.odds_ratio_loss(trainer(beta=0.2), chosen, rejected)[0]
    ours = losses.orpo(chosen, rejected, nll=nll, beta=0.2)
    batch.same(ours.mean(), nll - ratio.mean())  # as in its get_batch_loss_metrics


@pytest.mark.parametrize("kind", ["sigmoid", "simpo"])
def test_cpo_and_simpo(kind: str) -> None:
    from trl.experimental.cpo import CPOTrainer

    batch = Batch()
    chosen, rejected = batch.sums(batch.policy, mean=kind == "simpo")
    stub = trainer(alpha=0.0, loss_type=kind, beta=0.4, simpo_gamma=0.5, label_smoothing=0.0)
    theirs = CPOTrainer.cpo_loss(stub, chosen, rejected)[0]
    if kind == "simpo":
        ours = losses.simpo(chosen, rejected, beta=0.4, gamma=0.5)
    else:
        ours = losses.cpo(chosen, rejected, beta=0.4, nll=-chosen, nll_weight=0.1) + 0.1 * chosen
    batch.same(ours.mean(), theirs.mean())


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_grpo(level: str, beta: float) -> None:
    from trl import GRPOTrainer

    batch = Batch()
    stub = trainer(
        beta=beta,
        loss_type="grpo",
        epsilon_low=0.1,
        epsilon_high=0.15,
        top_entropy_quantile=1.0,
        importance_sampling_level=level,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        entropy_coef=0.0,
        use_adaptive_entropy=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.policy, torch.zeros(4, 5), None),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False),
    )
    ids = torch.ones(4, 5, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
    }
    theirs = GRPOTrainer._compute_loss(stub, None, inputs)
    ours = losses.grpo(
        batch.policy,
        batch.old,
        batch.advantages,
        batch.mask,
        epsilon=0.1,
        epsilon_high=0.15,
        ref_log_prob=batch.reference,
        beta=beta,
        sequence_level=level == "sequence",
    )
    batch.same(ours.mean(), theirs)


def test_rloo() -> None:
    from trl import RLOOTrainer

    batch = Batch()
    stub = trainer(
        epsilon_low=0.1,
        epsilon_high=0.15,
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.policy, torch.zeros(4, 5), None),
    )
    ids = torch.ones(4, 5, dtype=torch.long)
    old = (batch.old * batch.mask).sum(1)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_logps": old,
    }
    theirs = RLOOTrainer._compute_loss(stub, None, inputs)
    ours = losses.rloo(
        losses.sequence_log_prob(batch.policy, batch.mask),
        old,
        batch.advantages,
        epsilon=0.1,
        epsilon_high=0.15,
    )
    batch.same(ours.mean(), theirs)


def test_advantages() -> None:
    """TRL computes these inside a method that generates; here they are by their definitions."""
    rewards = torch.tensor([1.0, 2.0, 6.0, 0.0, 0.0, 3.0])
    first = rewards[:3]
    expected = (first - first.mean()) / (first.std() + 1e-4)
    assert_close(losses.group_advantages(rewards, 3)[:3], expected, rtol=1e-6)
    assert_close(
        losses.group_advantages(rewards, 3, scale=False)[3:], torch.tensor([-1.0, -1.0, 2.0])
    )
    assert_close(losses.leave_one_out(rewards, 3), torch.tensor([-3.0, -1.5, 4.5, -1.5, -1.5, 3.0]))
    with pytest.raises(ValueError, match="group must be at least 2"):
        losses.leave_one_out(rewards, 1)


def test_dft() -> None:
    """SFTTrainer with loss_type="dft": the sum over all tokens, divided by their number."""
    from trl import SFTTrainer

    batch = Batch()
    outputs = SimpleNamespace(
        log_probs=batch.policy * batch.mask,
        entropy=torch.zeros(4, 5),
        is_top1=torch.zeros(4, 5, dtype=torch.bool),
        label_mask=batch.mask.bool(),
    )
    stub = trainer(
        args=SimpleNamespace(loss_type="dft", average_tokens_across_devices=False),
        compute_loss_func=None,
        label_smoother=None,
    )
    stub.accelerator.parallelism_config = None
    inputs = {"attention_mask": batch.mask, "labels": batch.mask}
    theirs = SFTTrainer.compute_loss(stub, lambda **_: outputs, inputs)
    ours = (losses.dft(batch.policy) * batch.mask).sum() / batch.mask.sum()
    batch.same(ours, theirs)


def test_dft_through_query() -> None:
    """The gradient is that of the NLL of each token times its probability."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    hidden.requires_grad_()
    ids = torch.arange(6)
    log_prob = lmhead.query(hidden, weight, log_prob=ids).log_prob
    (found,) = torch.autograd.grad(losses.dft(log_prob).sum(), hidden, retain_graph=True)
    (nll,) = torch.autograd.grad(-log_prob.sum(), hidden)
    assert_close(found, nll * log_prob.detach().exp()[:, None], rtol=1e-9)
