"""`order="vllm"` against the sequence that vLLM documents, written out in NumPy.

Allowed ids, bad words, min tokens, logit bias; repetition penalty (prompt and output), frequency
and presence penalty (output alone); then the greedy choice, or temperature, min_p, top_k, top_p.
https://docs.vllm.ai/en/v0.22.1/api/vllm/v1/sample/sampler/
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close

from lmhead.sampling import Sampler

VOCAB = 60
OFF: dict[str, Any] = {
    "allowed_token_ids": None,
    "bad_words_ids": [],
    "min_tokens": 0,
    "stop_token_ids": [0],
    "logit_bias": {},
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "temperature": 1.0,
    "min_p": 0.0,
    "top_k": 0,
    "top_p": 1.0,
}


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max())
    return np.asarray(e / e.sum())


def edited(z: Array, prompt: list[int], output: list[int], o: dict[str, Any]) -> Array:
    """Logits (V,) before the temperature: what a greedy choice looks at."""
    z = z.copy()
    if o["allowed_token_ids"] is not None:
        z[[v for v in range(VOCAB) if v not in o["allowed_token_ids"]]] = -np.inf
    for *start, last in o["bad_words_ids"]:
        if output[len(output) - len(start) :] == start:
            z[last] = -np.inf
    if len(output) < o["min_tokens"]:
        z[o["stop_token_ids"]] = -np.inf
    for v, bias in o["logit_bias"].items():
        z[v] += bias
    for v in set(prompt + output):
        z[v] = z[v] / o["repetition_penalty"] if z[v] > 0 else z[v] * o["repetition_penalty"]
    for v in set(output):
        z[v] -= o["frequency_penalty"] * output.count(v) + o["presence_penalty"]
    return z


def drawn_from(z: Array, o: dict[str, Any]) -> Array:
    """Probabilities (V,) after the cuts."""
    z = z / o["temperature"]
    p = softmax(z)
    z = np.where(p < o["min_p"] * p.max(), -np.inf, z)
    if o["top_k"] > 0:
        z = np.where(z < np.sort(z)[-o["top_k"]], -np.inf, z)
    upwards = np.argsort(z)
    out = np.cumsum(softmax(z)[upwards]) <= 1 - o["top_p"]
    out[-1] = False  # one token always stays
    if o["top_p"] < 1:
        z[upwards[out]] = -np.inf
    return softmax(z)


def draw(r: random.Random) -> dict[str, Any]:
    """Some of the options."""
    output = {
        "allowed_token_ids": r.sample(range(VOCAB), 40),
        "bad_words_ids": [[r.randrange(5)], [r.randrange(5), r.randrange(VOCAB)], [1, 2, 3]],
        "min_tokens": r.choice([1, 4, 30]),
        "logit_bias": {r.randrange(VOCAB): r.choice([-4.0, 3.0]) for _ in range(4)},
        "repetition_penalty": r.choice([0.8, 1.2, 2.0]),
        "frequency_penalty": r.choice([-0.5, 0.3, 1.0]),
        "presence_penalty": r.choice([-1.0, 0.5, 2.0]),
        "temperature": r.choice([0.3, 0.8, 1.7]),
        "min_p": r.choice([0.01, 0.1, 0.5]),
        "top_k": r.choice([1, 3, 20, VOCAB]),
        "top_p": r.choice([0.1, 0.5, 0.9, r.random()]),
    }
    return {name: value for name, value in output.items() if r.random() < 0.5}


@pytest.mark.parametrize("seed", range(5))
def test_the_documented_sequence(seed: int) -> None:
    r = random.Random(seed)
    generator = np.random.default_rng(seed)
    for _ in range(60):
        given = draw(r)
        o = OFF | given
        # It ends with a token that starts no bad words: those are looked for in the output there.
        prompt = [*(r.randrange(8) for _ in range(r.randint(0, 9))), r.randint(5, 8)]
        output = [r.randrange(5) for _ in range(r.choice([0, 2, 8]))]
        z = 2 * generator.normal(size=VOCAB)
        before = edited(z, prompt, output, o)
        call: dict[str, Any] = {"context": [prompt + output], "prompt_length": len(prompt)}
        logits = torch.from_numpy(z)[None]
        options = given | {"stop_token_ids": o["stop_token_ids"]}
        sampler = Sampler(order="vllm", ties="keep", seed=0, **options)
        own = sampler.process(logits, **call)[0].softmax(0)
        assert_close(own, drawn_from(before, o), atol=1e-9, what=f"{given}")
        cold = Sampler(order="vllm", seed=0, **(options | {"temperature": 0.0}))
        assert cold(logits, **call).token.tolist() == [int(before.argmax())], given


def test_where_the_sequence_matters() -> None:
    # min_p comes before top_k and top_p, after temperature: p = 0.5, 0.3, 0.2; squared: 0.25 ...
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert Sampler(order="vllm", temperature=0.5, min_p=0.3)(logits).kept[0].tolist() == [0, 1]
    last = Sampler(order="llama.cpp", temperature=0.5, min_p=0.3)
    assert last(logits).kept[0].tolist() == [0, 1, 2]
    # The prompt counts for the repetition penalty, and not for the others.
    z = torch.zeros(1, 3) + 1
    call: dict[str, Any] = {"context": [[0, 1]], "prompt_length": 1}
    found = Sampler(order="vllm", repetition_penalty=2.0, presence_penalty=1.0).process(z, **call)
    assert found.tolist() == [[0.5, -0.5, 1.0]]
    # A bias comes before the penalty: (1 + 3) / 2, not 1 / 2 + 3.
    found = Sampler(order="vllm", repetition_penalty=2.0, logit_bias={0: 3.0}).process(z, **call)
    assert found.tolist() == [[2.0, 0.5, 1.0]]
