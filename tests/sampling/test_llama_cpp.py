"""`order="llama.cpp"` beside the real llama.cpp: the same tokens left, the same probabilities.

llama.cpp computes in float32. A setting whose kept tokens change when the logits move by 1e-5 is on
an edge where rounding decides; another one is drawn in its place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead.sampling import Sampler, stage, truncation_stages

pytest.importorskip("xllamacpp", reason="xllamacpp is not installed: no llama.cpp to compare with")
pytest.importorskip("gguf", reason="gguf is not installed: no model for llama.cpp can be written")

from llama_cpp_server import BREAKERS, EOS, VOCAB, LlamaCpp, NextToken, TinyLlama

OFF: dict[str, Any] = {
    "temperature": 1.0,
    "dynatemp_range": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
}
# In the sequence of llama.cpp's default chain.
STAGES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "bias": lambda r: {
        "logit_bias": {r.randrange(VOCAB): r.choice([-5.0, 1.5, 4.0]) for _ in range(5)}
    },
    "penalties": lambda r: {
        "repeat_penalty": r.choice([1.0, 0.8, 1.1, 1.5]),
        "presence_penalty": r.choice([0.0, 0.5, -1.0, 2.0]),
        "frequency_penalty": r.choice([0.0, 0.3, -0.2, 1.0]),
        "repeat_last_n": r.choice([0, 1, 5, 64, 100, 1000]),
    },
    "dry": lambda r: {
        "dry_multiplier": r.choice([0.5, 1.0, 3.0]),
        "dry_base": r.choice([1.0, 1.2, 1.75, 3.0]),
        "dry_allowed_length": r.choice([1, 2, 3, 5]),
        "dry_penalty_last_n": r.choice([0, 3, 10, 50, 1000]),
        "dry_sequence_breakers": r.choice([["Q"], ["Z"], ["Q", "Z"], ["~"]]),
    },
    "top_n_sigma": lambda r: {"top_n_sigma": r.choice([0.5, 1.0, 3.0, 3 * r.random()])},
    "top_k": lambda r: {"top_k": r.choice([1, 2, 5, 40, VOCAB - 1, VOCAB, VOCAB + 1, 0])},
    "typical": lambda r: {"typical_p": r.choice([0.01, 0.2, 0.9, 0.99, 1.0, r.random()])},
    "top_p": lambda r: {"top_p": r.choice([0.0, 0.1, 0.5, 0.99, 1.0, r.random()])},
    "min_p": lambda r: {"min_p": r.choice([0.01, 0.05, 0.5, 1.0, r.random()])},
    "xtc": lambda r: {
        "xtc_probability": 1.0,
        "xtc_threshold": r.choice([0.0, 0.01, 0.05, 0.1, 0.3, 0.5, 0.6]),
    },
    "temperature": lambda r: {
        "temperature": r.choice([0.1, 0.5, 0.8, 1.5, 3.0]),
        "dynatemp_range": r.choice([0.0, 0.0, 0.05, 0.3, 1.0, 2.0]),
        "dynatemp_exponent": r.choice([0.5, 1.0, 2.0]),
    },
}


@dataclass(frozen=True)
class Peer:
    """llama.cpp and some contexts with their logits."""

    server: LlamaCpp
    model: TinyLlama
    contexts: list[tuple[list[int], Tensor]]

    def logits(self, ids: list[int]) -> Tensor:
        """(V,), float64: llama.cpp's log-probabilities, plus what softmax took away."""
        own = self.model.logits(ids).double()
        theirs = self.server.log_probs(ids)
        assert_close(own.log_softmax(0), theirs, atol=5e-5, what="log-probabilities")
        return theirs + own.logsumexp(0)

    def next_token(self, ids: list[int], options: dict[str, Any]) -> NextToken:
        return self.server.next_token(ids, **theirs(options))


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Peer:
    model = TinyLlama()
    server = LlamaCpp(model.save(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))
    peer = Peer(server, model, [])
    r = random.Random(0)
    for _ in range(24):
        # Few different tokens, so that there is something to repeat; breakers among them.
        some = [*r.sample(range(3, VOCAB), r.choice([4, 8, 30])), 300, 302]
        ids = [1, *r.choices(some, k=r.randint(1, 120))]
        peer.contexts.append((ids, peer.logits(ids)))
    return peer


def theirs(options: dict[str, Any]) -> dict[str, Any]:
    """The options as the server has them."""
    asked = OFF | options
    if "logit_bias" in asked:
        asked["logit_bias"] = [[id, bias] for id, bias in asked["logit_bias"].items()]
    return asked


def sampler(options: dict[str, Any]) -> Sampler:
    own = dict(options)
    if "dry_sequence_breakers" in own:
        letters = own["dry_sequence_breakers"]
        own["dry_sequence_breakers"] = [
            id for letter in letters for id in BREAKERS.get(letter, [3 + ord(letter)])
        ]
    return Sampler(order="llama.cpp", seed=0, **own)


def probabilities(sampler: Sampler, z: Tensor, ids: list[int]) -> Tensor | None:
    """What is left of logits (V,), as (V,); None if moving them a little leaves other tokens."""
    generator = torch.Generator().manual_seed(0)
    noise = 1e-5 * torch.randn(5, VOCAB, dtype=torch.float64, generator=generator)
    noise[0] = 0
    out = sampler.process(z + noise, [ids] * 5)
    left = out > -torch.inf
    assert sampler(z[None], [ids]).kept[0].tolist() == left[0].nonzero()[:, 0].tolist()
    return out[0].softmax(0) if bool((left == left[0]).all()) else None


def assert_same(own: Tensor, theirs: NextToken, what: str) -> None:
    """The same tokens, but for those whose float32 probability is none; the same probabilities."""
    found = torch.zeros(VOCAB, dtype=torch.float64)
    for id, p in theirs.probability.items():
        found[id] = p
    tiny = 1e-30
    assert (own > tiny).nonzero().tolist() == (found > tiny).nonzero().tolist(), what
    assert_close(own, found, atol=1e-4, what=what)


def check_many(peer: Peer, draw: Callable[[], dict[str, Any]], r: random.Random, n: int) -> None:
    """n settings; few may be on an edge."""
    edges = 0
    for _ in range(n):
        options = draw()
        ids, z = r.choice(peer.contexts)
        own = probabilities(sampler(options), z, ids)
        if own is None:
            edges += 1
            continue
        assert_same(own, peer.next_token(ids, options), f"{options} after {len(ids)} ids")
    assert edges <= n / 5


def test_nothing_asked_for_is_the_softmax(peer: Peer) -> None:
    for ids, z in peer.contexts:
        assert_same(z.softmax(0), peer.next_token(ids, {}), "softmax")


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_alone(peer: Peer, stage: str) -> None:
    r = random.Random(stage)
    check_many(peer, lambda: STAGES[stage](r), r, 40)


def without_artefacts(options: dict[str, Any]) -> dict[str, Any]:
    """Tokens that top_n_sigma removes stay in llama.cpp's list with probability 0. After that,
    typical_p takes 0 log 0 for NaN, XTC finds them likely if its threshold is 0, and min_keep and
    the dynamic temperature (see below) count them. Here they are gone: these are not combined.
    """
    if options.get("top_n_sigma", 0) <= 0:
        return options
    changed: dict[str, Any] = {"typical_p": 1.0, "dynatemp_range": 0.0, "min_keep": 1}
    changed["xtc_threshold"] = max(options.get("xtc_threshold", 0), 0.01)
    return options | changed


@pytest.mark.parametrize("seed", range(10))
def test_stages_together_in_the_default_sequence(peer: Peer, seed: int) -> None:
    r = random.Random(seed)

    def draw() -> dict[str, Any]:
        options: dict[str, Any] = {"min_keep": r.choice([1, 1, 1, 3, 10])}
        for make in STAGES.values():
            if r.random() < 0.4:
                options |= make(r)
        return without_artefacts(options)

    check_many(peer, draw, r, 40)


def test_dynamic_temperature_after_top_n_sigma_counts_other_tokens(peer: Peer) -> None:
    # T = low + (high - low) · (entropy / log n)^exponent: n is all tokens there, those left here.
    asked = {"top_n_sigma": 1.0, "temperature": 1.0, "dynatemp_range": 0.5}
    for ids, z in peer.contexts[:8]:
        struck = sampler({"top_n_sigma": 1.0}).process(z[None])[0]
        p = struck.softmax(0)
        entropy = float(torch.special.entr(p).sum())
        left = int((p > 0).sum())
        here = (struck / (0.5 + entropy / math.log(left))).softmax(0)
        assert_close(sampler(asked).process(z[None])[0].softmax(0), here, atol=1e-12)
        there = (struck / (0.5 + entropy / math.log(VOCAB))).softmax(0)
        assert_same(there, peer.next_token(ids, asked), "dynamic temperature")


def test_any_sequence_of_cuts(peer: Peer) -> None:
    r = random.Random(1)
    for _ in range(100):
        k, p, m, t = r.choice([3, 20, 100]), r.random(), 0.1 * r.random(), 0.3 + 2 * r.random()
        typical, likely = 0.5 + r.random() / 2, 0.2 * r.random()
        stages = {
            "top_k": truncation_stages.TopK(k),
            "top_p": truncation_stages.TopP(p),
            "min_p": truncation_stages.MinP(m),
            "typ_p": truncation_stages.Typical(typical),
            "xtc": truncation_stages.XTC(1.0, likely),
            "temperature": stage.Temperature(t),
        }
        names = r.sample(list(stages), r.randint(2, 6))
        ids, z = r.choice(peer.contexts)
        own = probabilities(Sampler(stages=[stages[name] for name in names], seed=0), z, ids)
        if own is not None:
            asked: dict[str, Any] = {"top_k": k, "top_p": p, "min_p": m, "typical_p": typical}
            asked |= {"xtc_probability": 1.0, "xtc_threshold": likely, "temperature": t}
            asked["samplers"] = names
            assert_same(own, peer.next_token(ids, asked), f"{asked}")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 3},
        {"typical_p": 0.2},
        {"top_k": 5, "typical_p": 0.5},
        {"typical_p": 0.9, "min_keep": 10},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"repeat_penalty": 1.5, "xtc_probability": 1.0, "xtc_threshold": 0.03, "min_p": 0.2},
        {"presence_penalty": 5.0},
    ],
)
def test_temperature_0_takes_the_best_token_that_is_left(
    peer: Peer, options: dict[str, Any]
) -> None:
    for ids, z in peer.contexts:
        sampled = sampler(options | {"temperature": 0.0})(z[None], [ids])
        answer = peer.next_token(ids, options | {"temperature": 0.0})
        assert [answer.token] == sampled.token.tolist() == sampled.kept[0].tolist()
        assert answer.probability == {answer.token: 1.0}


def test_generated_tokens_count_like_the_prompt(peer: Peer) -> None:
    options = {
        "repeat_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "repeat_last_n": 6,
        "dry_multiplier": 2.0,
        "dry_allowed_length": 1,
        "dry_sequence_breakers": ["Z"],
        "top_k": 8,
        "logit_bias": {EOS: -50.0},
    }
    for ids, _ in peer.contexts[:8]:
        context = list(ids)
        for answer in peer.server.next_tokens(ids, 8, **theirs(options)):
            own = probabilities(sampler(options), peer.logits(context), context)
            if own is not None:
                assert_same(own, answer, f"{len(context)} ids")
            context.append(answer.token)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_from_token_to_token(peer: Peer, version: int) -> None:
    rows, compared = 200, 0
    r = random.Random(version)
    for ids, _ in peer.contexts[:12]:
        options: dict[str, Any] = {
            "mirostat": version,
            "mirostat_tau": r.choice([1.5, 2.0, 3.0, 5.0]),
            "mirostat_eta": r.choice([0.05, 0.3, 1.0]),
            "temperature": r.choice([0.6, 1.0, 1.5]),
            "logit_bias": {EOS: -50.0},
        }
        context, state = list(ids), None
        for answer in peer.server.next_tokens(ids, 6, **theirs(options)):
            z = peer.logits(context).expand(rows, -1)
            ours = Sampler(order="llama.cpp", seed=list(range(rows)), **options)
            sampled = ours(z, [context] * rows, state=state)
            assert sampled.kept[0].tolist() == sorted(answer.probability), f"{options}"
            # The learning depends on the token: go on from a row that drew the same one.
            same = (sampled.token == answer.token).nonzero()[:, 0].tolist()
            if not same:
                break
            p = float(sampled.log_prob[same[0]].exp())
            assert p == pytest.approx(answer.probability[answer.token], abs=1e-4)
            assert sampled.state is not None
            state = sampled.state[same[0]].repeat(rows)
            context.append(answer.token)
            compared += 1
    assert compared >= 40
