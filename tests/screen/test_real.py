"""A real head and real hidden states: SmolLM2-135M on four windows of WikiText-2."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from shared_data import SMOLLM2_HEAD, SMOLLM2_STATES, needs
from torch import Tensor

from lmhead import LMHead, Sampler
from lmhead.screen import ScreenedHead
from screen import heads

FILES = (SMOLLM2_STATES, SMOLLM2_HEAD)

pytestmark = needs(*FILES)


class Real(NamedTuple):
    hidden: Tensor  # (1024, 576), every second state
    head: LMHead
    best: Tensor  # (1024, 50), ids by float64 logit
    some: Tensor  # (128, 576), every sixteenth state
    samples: Callable[[Sampler], Tensor]  # (128,) tokens from their float64 logits
    screened: Callable[..., ScreenedHead]  # (bits, calibrated): each is made once


@pytest.fixture(scope="module")
def real() -> Real:
    states, parameters = (load_file(file) for file in FILES)
    weight = parameters["weight"].double()
    # The closest two of the best fifty are 1e-7 apart: the order of summation cannot swap them.
    every = states["hidden"]
    hidden = every[::2]
    best = [(h.double() @ weight.T).topk(50).indices for h in torch.split(hidden, 128)]
    head, some = heads.head_of(weight.float()), every[5::16]

    @functools.cache
    def screened(bits: Any, calibrated: bool = True) -> ScreenedHead:
        calibration = every[::8] if calibrated else None
        return ScreenedHead(head, bits=bits, calibration=calibration)

    logits, kept = some.double() @ weight.T, dict[str, Tensor]()

    def samples(sampler: Sampler) -> Tensor:
        if repr(sampler) not in kept:
            position = torch.arange(len(some))
            kept[repr(sampler)] = sampler(logits, position=position).token
        return kept[repr(sampler)]

    return Real(hidden, head, torch.cat(best), some, samples, screened)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("bits", [8, "4+4"])
def test_every_token_is_that_of_float64(real: Real, bits: object, calibrated: bool) -> None:
    screened = real.screened(bits, calibrated)
    some = slice(None, None, 1 if calibrated else 4)
    first = screened.argmax(real.hidden[some])
    top = screened.topk(real.hidden[some], 50)
    assert int((first.token != real.best[some, 0]).sum()) == 0
    assert int((top.indices != real.best[some]).any(1).sum()) == 0
    for answer, most in ((first, 5), (top, 150 if calibrated else 170)):
        assert not bool(answer.certificate.fell_back.any())
        assert float(answer.certificate.rows_rescored.double().mean()) <= most


def test_the_torch_operations_agree(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    screened = real.screened("4+4")
    monkeypatch.setattr("lmhead.sweep.kernels.core", None)
    some = slice(0, 1024, 64)
    assert torch.equal(screened.topk(real.hidden[some], 50).indices, real.best[some])


def test_bytes_read_for_one_state(real: Real) -> None:
    weights = real.head.weight.numel()
    eight = real.screened(8)
    assert eight.argmax(real.hidden[9]).certificate.bytes_read < 1.2 * weights
    assert eight.nbytes < 1.2 * weights
    four = real.screened("4+4")
    read = [four.argmax(h).certificate.bytes_read for h in real.hidden[::32]]
    assert sum(read) / len(read) < 0.7 * weights


@pytest.mark.parametrize("bits", [8, "4+4"])
@pytest.mark.parametrize(
    "options",
    [{}, {"min_p": 0.05}, {"top_p": 0.9}, {"top_k": 50}, {"top_p": 0.9, "temperature": 0.7}],
    ids=str,
)
def test_every_sample_is_that_of_float64(real: Real, bits: Any, options: dict[str, Any]) -> None:
    sampler = Sampler(seed=2024, **options)
    position = torch.arange(len(real.some))
    answer = real.screened(bits).sample(real.some, sampler, position=position)
    assert int((answer.token != real.samples(sampler)).sum()) == 0
    # "4+4" bounds the mass of all tokens too widely for most nuclei.
    most = 0.05 if bits == 8 else 1.0 if "top_p" in options else 0.25
    assert answer.certificate.fall_back_rate <= most
