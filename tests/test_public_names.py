"""The public names are a contract: their arguments, order and defaults."""

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

import lmhead

SIGNATURES = {
    "LMHead": "(hidden_size, vocab_size, *, bias=False, softcap=None, scale=1.0, device=None, "
    "dtype=None)",
    "LMHead.from_linear": "(linear, *, softcap=None, scale=1.0)",
    "LMHead.tied": "(embedding, *, bias=False, softcap=None, scale=1.0)",
    "linear_cross_entropy": "(hidden, weight, targets, *, bias=None, class_weight=None, "
    "ignore_index=-100, reduction='mean', label_smoothing=0.0, softcap=None, scale=1.0, "
    "z_loss=0.0, num_items=None, grad_filter=None, max_bytes=None)",
    "query": "(hidden, weight, *, bias=None, softcap=None, scale=1.0, log_prob=None, rank=None, "
    "entropy=False, logsumexp=False, argmax=False, top_k=0, kl_to=None, max_bytes=None)",
    "divergence": "(p, q, *, kind='kl', beta=0.5, temperature=1.0, top_k=None, mask=None)",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    thing: Any = lmhead
    for part in name.split("."):
        thing = getattr(thing, part)
    found = inspect.signature(thing).parameters.values()
    contract = re.findall(r"(\w+)(?:=[^,)]+)?", SIGNATURES[name])
    # More options may join, by keyword and with a default; what is promised stays as it is.
    more = [p for p in found if p.name not in contract]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in more)
    promised = [p.replace(annotation=p.empty) for p in found if p.name in contract]
    assert str(inspect.Signature(promised)) == SIGNATURES[name]


@pytest.mark.parametrize("name", lmhead.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    thing = getattr(lmhead, name)
    assert name in dir(lmhead)
    if name != "__version__":
        assert thing.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="LMHaed"):
        _ = lmhead.LMHaed


def test_answers_has_one_field_per_question() -> None:
    answers = lmhead.query(torch.randn(2, 3), torch.randn(5, 3), entropy=True)
    questions = ["log_prob", "rank", "entropy", "logsumexp", "argmax", "top_k", "kl"]
    questions += ["log_sum_sq", "mean_logit", "top1_match"]
    if is_dataclass(answers):
        assert {field.name for field in fields(answers)} == set(questions)
    assert isinstance(answers, lmhead.Answers)
    for question in questions:
        assert (getattr(answers, question) is not None) == (question == "entropy")


def test_every_answer_of_one_query() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 4, 3), torch.randn(5, 3)
    ids = torch.randint(5, (2, 4))
    answers = lmhead.query(
        hidden,
        weight,
        log_prob=ids,
        rank=ids,
        entropy=True,
        logsumexp=True,
        argmax=True,
        top_k=2,
        kl_to=(hidden, weight),
    )
    for answer in (answers.log_prob, answers.entropy, answers.logsumexp, answers.kl):
        assert answer is not None
        assert (answer.shape, answer.dtype) == ((2, 4), torch.float32)
    for places in (answers.rank, answers.argmax):
        assert places is not None
        assert (places.shape, places.dtype) == ((2, 4), torch.int64)
    assert answers.top_k is not None
    values, indices = answers.top_k
    assert torch.equal(values, answers.top_k.values)
    assert torch.equal(indices[..., 0], answers.argmax)
    assert answers.kl is not None
    assert answers.kl.abs().max() < 1e-6


def test_kl_to_lazy_logits() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 3), torch.randn(5, 3)
    teacher = lmhead.LMHead(4, 5, bias=True, softcap=2.0)
    states = torch.randn(6, 4)
    kl = lmhead.query(hidden, weight, kl_to=teacher(states)).kl
    log_p = (hidden @ weight.T).log_softmax(-1)
    raw = torch.nn.functional.linear(states, teacher.weight, teacher.bias)
    log_q = (2.0 * torch.tanh(raw / 2.0)).log_softmax(-1)
    torch.testing.assert_close(kl, (log_p.exp() * (log_p - log_q)).sum(-1))


# --- advice on tying ------------------------------------------------------------------------------


def test_advice_counts_what_tying_saves() -> None:
    advice = lmhead.advise_tying(49_152, 576, 30)
    saved = 49_152 * 576
    assert advice.parameters_saved == saved
    assert advice.bytes_saved == 4 * saved
    assert lmhead.advise_tying(49_152, 576, 30, bytes_per_parameter=2).bytes_saved == 2 * saved
    # Of a model with two embeddings and 30 blocks of about 12 D^2 parameters.
    assert advice.share == pytest.approx(saved / (2 * saved + 30 * 12 * 576**2))
    assert f"{saved:,}" in str(advice)


def test_advice_ties_small_models_and_not_large_ones() -> None:
    small, large = lmhead.advise_tying(49_152, 576, 30), lmhead.advise_tying(32_000, 4096, 32)
    assert small.tie
    assert not large.tie
    for advice in (small, large):
        assert advice.reasons
        assert all(reason in str(advice) for reason in advice.reasons)
        assert "untie" in str(advice)


def test_advice_does_not_tie_what_cannot_be_shared() -> None:
    for advice in (
        lmhead.advise_tying(49_152, 576, 30, same_vocabulary=False),
        lmhead.advise_tying(49_152, 576, 30, sharded=True),
    ):
        assert not advice.tie
        assert advice.reasons
