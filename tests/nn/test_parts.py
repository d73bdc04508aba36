"""The parts against the textbook: attention, norms, feed-forward, positions."""

from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead import reference
from lmhead.nn import Attention, AttentionMask, Block, FeedForward, TransformerConfig
from lmhead.nn.multi_head_attention import causal_attention_mask, rotary_angles, rotate
from lmhead.nn.transformer import make_norm


def config(**changes: Any) -> TransformerConfig:
    sizes: dict[str, Any] = {"vocab_size": 9, "hidden_size": 12, "num_attention_heads": 4}
    return TransformerConfig(**(sizes | changes))


def filled(module: torch.nn.Module) -> Any:
    torch.manual_seed(0)
    for parameter in module.double().parameters():
        torch.nn.init.normal_(parameter, mean=0.5 if parameter.dim() == 1 else 0.0, std=0.5)
    return module.requires_grad_(False)


def numbers(*shape: int) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64)


def split(x: Tensor, heads: int) -> "np.ndarray[Any, Any]":
    """(B, T, heads · d) to (B, heads, T, d), by hand."""
    return np.stack(np.split(x.numpy(), heads, axis=-1), axis=1)


def textbook(attention: Any, x: Tensor, source: Tensor, mask: Any) -> "np.ndarray[Any, Any]":
    query = split(attention.query(x), attention.heads)
    share = attention.heads // attention.key_heads
    key, value = (
        np.repeat(split(part(source), attention.key_heads), share, axis=1)
        for part in (attention.key, attention.value)
    )
    attended = reference.attention(query, key, value, mask)
    joined = np.concatenate(list(np.swapaxes(attended, 0, 1)), axis=-1)
    out: np.ndarray[Any, Any] = attention.output(torch.from_numpy(joined)).numpy()
    return out


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("head_dim", [None, 5])
@pytest.mark.parametrize("length", [1, 7])
def test_attention_is_the_textbooks(groups: int, head_dim: int | None, length: int) -> None:
    attention = filled(Attention(config(num_key_value_heads=groups, head_dim=head_dim, bias=True)))
    x, source = numbers(3, length, 12), numbers(3, 5, 12)
    causal = reference.causal_mask(length)
    found, _ = attention(x, causal_attention_mask(0, length, None))
    assert_close(found, textbook(attention, x, x, causal), atol=1e-12)
    found, _ = attention(x, AttentionMask())
    assert_close(found, textbook(attention, x, x, None), atol=1e-12)
    mask = torch.arange(5) < torch.tensor([[5], [1], [3]])
    found = attention.attend(x, attention.project(source), AttentionMask(mask[:, None, None]))
    expected = textbook(attention, x, source, mask[:, None, None].numpy())
    assert_close(found, expected, atol=1e-12)


def test_who_sees_whom() -> None:
    assert causal_attention_mask(0, 4, None) == AttentionMask(None, True)
    assert causal_attention_mask(5, 1, None) == AttentionMask(None, False)
    more = causal_attention_mask(1, 2, None)
    assert more.mask is not None
    assert more.mask[0, 0].tolist() == [[True, True, False], [True, True, True]]
    padded = causal_attention_mask(0, 3, torch.tensor([[False, True, True]]))
    assert padded.mask is not None
    # Padding sees itself, so that its softmax has something to sum; no other position does.
    assert padded.mask[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_norms_are_the_textbooks() -> None:
    x = numbers(2, 3, 12)
    layer = filled(make_norm(config(bias=True, norm_eps=1e-3)))
    expected = reference.layer_norm(x.numpy(), layer.weight.numpy(), layer.bias.numpy(), eps=1e-3)
    assert_close(layer(x), expected, atol=1e-12)
    rms = filled(make_norm(config(norm="rms", norm_eps=1e-3)))
    values = x.numpy()
    expected = rms.weight.numpy() * values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-3)
    assert_close(rms(x), expected, atol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_feed_forward_is_the_textbooks(activation: Any) -> None:
    part = filled(FeedForward(config(activation=activation, bias=True, intermediate_size=7)))
    x = numbers(2, 3, 12)
    expected = reference.feed_forward(
        x.numpy(),
        part.up.weight.numpy(),
        part.down.weight.numpy(),
        up_bias=part.up.bias.numpy(),
        down_bias=part.down.bias.numpy(),
        activation=activation,
    )
    assert_close(part(x), expected, atol=1e-12)


def test_swiglu() -> None:
    part = filled(FeedForward(config(activation="swiglu")))
    x = numbers(2, 12)
    gate, up = part.gate(x), part.up(x)
    assert_close(part(x), part.down(gate * gate.sigmoid() * up), atol=1e-12)
    assert part.up.out_features == 32  # 8/3 of 12


@pytest.mark.parametrize("norm_first", [True, False])
def test_add_and_norm_are_the_textbooks(norm_first: bool) -> None:
    block = filled(Block(config(norm_first=norm_first, bias=True)))
    x = numbers(1, 5, 12)
    add = reference.pre_norm if norm_first else reference.post_norm

    def sublayer(part: Any) -> Any:
        return lambda values: part(torch.from_numpy(values)).numpy()

    after = x.numpy()
    for norm, part in (
        (block.attention_norm, lambda y: block.attention(y, AttentionMask(causal=True))[0]),
        (block.feed_forward_norm, block.feed_forward),
    ):
        after = add(after, sublayer(part), norm.weight.numpy(), norm.bias.numpy())
    assert_close(block(x, AttentionMask(causal=True))[0], after, atol=1e-12)


@pytest.mark.parametrize("rotary", ["half", "interleaved"])
def test_turned_heads_know_their_distance_alone(rotary: str) -> None:
    query, key = numbers(1, 1, 1, 8), numbers(1, 1, 1, 8) + 1

    def score(at: int, of: int) -> float:
        places = (torch.tensor([[place]]) for place in (at, of))
        turned = (
            rotate(x, rotary_angles(place, 8, 10000.0, torch.float64), rotary)
            for x, place in zip((query, key), places, strict=True)
        )
        a, b = turned
        return float((a * b).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-10)
    assert score(0, 0) == pytest.approx(float((query * key).sum()))
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_a_turn_is_exact_far_into_a_text() -> None:
    cos, sin = rotary_angles(torch.tensor([[1_000_001]]), 4, 10000.0, torch.float32)
    expected = np.array([1_000_001.0, 10_000.01])
    assert_close(cos.flatten().double(), np.cos(expected), atol=1e-7)
    assert_close(sin.flatten().double(), np.sin(expected), atol=1e-7)
