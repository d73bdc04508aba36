"""`sampler.explain`: its numbers are the textbook's, and it reads as a table and as JSON."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, float64

from lmhead import LMHead, Sampler
from lmhead import reference as ref
from lmhead.sampling import Explanation

OPTIONS: dict[str, Any] = {
    "logit_bias": {3: 1.0, 9: -math.inf},
    "repetition_penalty": 1.5,
    "temperature": 0.8,
    "top_k": 30,
    "top_p": 0.9,
    "min_p": 0.05,
}
CONTEXT = [[1, 2], [5]]


def logits() -> torch.Tensor:
    z = torch.randn(2, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    z[1, ::7] = -math.inf
    return z


def steps_of_the_textbook(z: Array) -> dict[str, Array]:
    steps = {"logits": z}
    z = steps["logit_bias"] = ref.logit_bias(z, OPTIONS["logit_bias"])
    z = steps["repetition_penalty"] = ref.repetition_penalty(z, CONTEXT, 1.5)
    z = steps["temperature"] = ref.temperature_scale(z, 0.8)
    z = steps["top_k"] = ref.top_k_filter(z, 30)
    z = steps["top_p"] = ref.top_p_filter(z, 0.9)
    steps["min_p"] = ref.min_p_filter(z, 0.05)
    return steps


@pytest.mark.both_cores
def test_numbers() -> None:
    z = logits()
    explanation = Sampler(seed=1, **OPTIONS).explain(z, CONTEXT)
    want = steps_of_the_textbook(float64(z))
    model = ref.softmax(float64(z))
    for row, steps in enumerate(explanation.steps):
        assert [s.stage for s in steps] == list(want)
        before = want["logits"][row]
        for step in steps:
            after = want[step.stage][row]
            alive, gone = np.isfinite(after), np.isfinite(before) & ~np.isfinite(after)
            assert step.row == row
            assert step.kept == alive.sum()
            assert step.mass == pytest.approx(min(1.0, model[row, alive].sum()), abs=1e-12)
            assert step.cut == gone.sum()
            p = ref.softmax(before)
            assert step.cut_mass == pytest.approx(p[gone].sum(), abs=1e-12)
            ids = np.flatnonzero(gone)
            assert step.cut_ids == ids[np.argsort(-p[ids], kind="stable")][:8].tolist()
            assert step.entropy == pytest.approx(float(ref.entropy(after)), abs=1e-9)
            assert step.best == after.argmax()
            assert step.best_prob == pytest.approx(ref.softmax(after).max(), abs=1e-12)
            before = after
    assert steps[0].settings == ""
    assert "1.5" in explanation.steps[0][2].settings


@pytest.mark.both_cores
@pytest.mark.parametrize(
    "more", [{}, {"do_sample": False}, {"order": "llama.cpp"}, {"order": "vllm"}], ids=str
)
def test_the_token_is_the_one_that_comes(more: dict[str, Any]) -> None:
    z = logits()
    sampler = Sampler(seed=1, **OPTIONS, **more)
    explanation, sampled = sampler.explain(z, CONTEXT), sampler(z, CONTEXT)
    assert list(explanation.tokens) == sampled.token.tolist()
    if not sampler.is_greedy:
        last = [steps[-1] for steps in explanation.steps]
        assert [s.kept for s in last] == sampled.kept.counts()
        masses = sampled.log_kept_mass.exp().tolist()
        assert [s.mass for s in last] == pytest.approx(masses, abs=1e-9)


def test_a_greedy_row_among_others_is_explained_as_it_is_chosen() -> None:
    z = logits()
    sampler = Sampler(temperature=[0.0, 1.0], top_k=20, seed=1)
    explanation = sampler.explain(z)
    assert list(explanation.tokens) == sampler(z).token.tolist()
    assert [steps[0].row for steps in explanation.steps] == [0, 1]
    drawn = sampler.process(z)[1]
    assert (drawn > -math.inf).sum() == 20
    assert torch.equal(drawn, Sampler(top_k=20).process(z)[1])


def test_lazy_logits() -> None:
    head = LMHead(8, 60)
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 3
    sampler = Sampler(seed=1, top_p=0.8, temperature=0.7)
    lazy, dense = sampler.explain(head(hidden)), sampler.explain((hidden @ head.weight.T).detach())
    assert lazy.tokens == dense.tokens
    for a, b in zip(lazy.steps, dense.steps, strict=True):
        assert [(s.stage, s.kept, s.cut, s.best) for s in a] == [
            (s.stage, s.kept, s.cut, s.best) for s in b
        ]


def test_the_table() -> None:
    z = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    text = str(Sampler(seed=0, temperature=0.5, top_k=2).explain(z))
    lines = text.splitlines()
    assert lines[0].startswith("row 0, token ")
    assert " ".join(lines[1].split()) == "stage tokens mass cut cut mass entropy best p(best)"
    assert lines[2].split() == ["logits", "4", "1.0000", "0", "0.0000", "0.948", "0", "0.6439"]
    assert lines[3].split() == ["temperature", "4", "1.0000", "0", "0.0000", "0.455", "0", "0.8650"]
    assert lines[4].split() == ["top_k", "2", "0.8808", "2", "0.0180", "0.365", "0", "0.8808"]
    assert len({len(line) for line in lines[1:]}) == 1, "columns are aligned"
    two = str(Sampler(seed=0).explain(z.expand(2, 4)))
    assert "\n\nrow 1, token " in two


def test_json_round_trip() -> None:
    explanation = Sampler(seed=1, **OPTIONS).explain(logits(), CONTEXT)
    read = json.loads(explanation.to_json())
    assert read["tokens"] == list(explanation.tokens)
    rows = [[dataclasses.asdict(s) for s in steps] for steps in explanation.steps]
    assert read["rows"] == rows
    kind = type(explanation.steps[0][0])
    again = Explanation(
        tuple(tuple(kind(**step) for step in steps) for steps in read["rows"]),
        tuple(read["tokens"]),
    )
    assert again == explanation


def test_an_empty_chain_and_an_empty_batch() -> None:
    alone = Sampler(seed=0).explain(torch.zeros(1, 3))
    assert [s.stage for s in alone.steps[0]] == ["logits"]
    none = Sampler(seed=0, top_p=0.5).explain(torch.zeros(0, 3))
    assert (none.steps, none.tokens, str(none)) == ((), (), "")
