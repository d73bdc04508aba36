"""`BatchDecoder`: a sequence gets the same numbers alone and in any company."""

import random

import pytest
import torch

from lmhead.nn import DecoderBody, DecoderConfig
from lmhead.nn.batch_decode import BatchDecoder, SequenceCache
from lmhead.nn.decode_step import attach_step

CONFIGS = {
    "llama": {"norm": "rms", "activation": "swiglu", "num_key_value_heads": 2},
    "core": {"norm": "rms", "activation": "swiglu", "num_key_value_heads": 2},
    "gpt2": {"position": "learned", "activation": "gelu_tanh", "bias": True},
    "vaswani": {"position": "sinusoidal", "activation": "relu", "norm_first": False, "bias": True},
}  # fmt: skip


def body(kind: str, dtype: torch.dtype = torch.float32) -> DecoderBody:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, max_length=200,
        **{"position": "rotary", "intermediate_size": 45, **CONFIGS[kind]},  # type: ignore[arg-type]
    )  # fmt: skip
    made = DecoderBody(config).to(dtype).eval().requires_grad_(False)
    for parameter in made.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    if kind == "core":
        attach_step(made)
    return made


def alone(decoder: BatchDecoder, prompt: list[int], tokens: list[int]) -> list[torch.Tensor]:
    hidden, cache = decoder.start(prompt)
    return [hidden, *(decoder.step([token], [cache])[0] for token in tokens)]


@pytest.mark.both_cores
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_company_changes_no_bit(kind: str, dtype: torch.dtype) -> None:
    """Sequences of random lengths join and leave at random."""
    rng = random.Random(1)
    decoder = BatchDecoder(body(kind, dtype))
    plans = [
        ([rng.randrange(50) for _ in range(rng.randrange(1, 12))],
         [rng.randrange(50) for _ in range(rng.randrange(1, 90))])
        for _ in range(7)
    ]  # fmt: skip
    want = [alone(decoder, *plan) for plan in plans]
    found: list[list[torch.Tensor]] = [[] for _ in plans]
    caches: dict[int, SequenceCache] = {}
    waiting = list(range(len(plans)))
    while waiting or caches:
        if waiting and (not caches or rng.random() < 0.3):
            number = waiting.pop()
            hidden, caches[number] = decoder.start(plans[number][0])
            found[number].append(hidden)
        tokens = [plans[number][1][len(found[number]) - 1] for number in caches]
        for number, hidden in zip(
            list(caches), decoder.step(tokens, list(caches.values())), strict=True
        ):
            found[number].append(hidden)
            if len(found[number]) > len(plans[number][1]):
                del caches[number]
    for ours, theirs in zip(found, want, strict=True):
        assert len(ours) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_numbers_are_the_bodys(kind: str) -> None:
    plain = body(kind)
    ids = [random.Random(2).randrange(50) for _ in range(150)]
    states = torch.stack(alone(BatchDecoder(plain), ids[:5], ids[5:]))
    truth = body(kind, torch.float64)(torch.tensor([ids]))[0][0, 4:]
    naive = plain(torch.tensor([ids]))[0][0, 4:]
    assert (states - truth).abs().max() <= 2 * (naive - truth).abs().max() + 1e-6


@torch.no_grad()
def test_the_core_gives_the_numbers_of_one_sequence() -> None:
    """Those that `generate` gets, from the same call into the core."""
    made = body("core")
    if made.step is None:
        pytest.skip("this test needs the compiled core")
    decoder, ids = BatchDecoder(made), [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    _, other = decoder.start([7, 7])
    hidden, sequence = decoder.start(ids[:3])
    alone, cache = made(torch.tensor([ids[:3]]))
    assert torch.equal(hidden, alone[0, -1])
    for id in ids[3:]:
        alone, cache = made(torch.tensor([[id]]), cache)
        assert torch.equal(
            decoder.step([8, id, 9], [other.copy(), sequence, other])[1], alone[0, 0]
        )


@torch.no_grad()
def test_a_changed_weight_is_left_to_torch() -> None:
    made = body("core")
    decoder = BatchDecoder(made)
    made.blocks[0].feed_forward.down.weight.mul_(2.0)  # type: ignore[operator, union-attr]
    states = torch.stack(alone(decoder, [3, 1, 4], [1, 5]))
    assert decoder._core is None
    torch.testing.assert_close(states, made(torch.tensor([[3, 1, 4, 1, 5]]))[0][0, 2:])


@pytest.mark.parametrize("kind", ["llama", "core"])
def test_a_copy_continues_in_its_own_way(kind: str) -> None:
    decoder = BatchDecoder(body(kind))
    _, cache = decoder.start([1, 2, 3])
    other = cache.copy()
    decoder.step([4], [cache])
    assert torch.equal(decoder.step([5], [other])[0], alone(decoder, [1, 2, 3], [5])[1])
    assert (cache.length, other.length) == (4, 4)


def test_weights_are_shared() -> None:
    plain = body("llama")
    decoder = BatchDecoder(plain)
    pairs = zip(plain.parameters(), decoder._rows.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    assert not any(type(m).__name__ == "RowLinear" for m in plain.modules())


def test_cross_attention_is_refused() -> None:
    made = DecoderBody(body("llama").sizes, cross=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cross-attention"):
        BatchDecoder(made)
