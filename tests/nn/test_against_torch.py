"""Blocks, encoder, decoder and the whole against torch.nn.Transformer* with the same weights."""

from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor, nn

from lmhead.nn import AttentionMask, EncoderDecoder, EncoderDecoderConfig

VOCAB, SIZE, HEADS, INNER = 37, 24, 3, 40
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
KINDS = [
    pytest.param(norm_first, activation, id=f"{'pre' if norm_first else 'post'}-{activation}")
    for norm_first in (True, False)
    for activation in ("relu", "gelu")
]


def scatter(module: nn.Module) -> None:
    """Weights far from flat, so that nothing hides."""
    with torch.no_grad():
        for parameter in module.parameters():
            nn.init.normal_(parameter, mean=0.8 if parameter.dim() == 1 else 0.0, std=0.3)


def ours(norm_first: bool, activation: Any) -> EncoderDecoder:
    torch.manual_seed(0)
    model = EncoderDecoder(
        EncoderDecoderConfig(
            vocab_size=VOCAB,
            hidden_size=SIZE,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            encoder_layers=2,
            decoder_layers=3,
            position="sinusoidal",
            norm_first=norm_first,
            activation=activation,
            bias=True,
            embedding_scale=SIZE**0.5,
        )
    ).double()
    scatter(model)
    return model


def copy(here: nn.Module, there: nn.Module) -> None:
    """Our parameters into a module of torch that has the same names for them."""
    there.load_state_dict(here.state_dict())


def copy_attention(here: Any, there: nn.MultiheadAttention) -> None:
    asked = [here.query, here.key, here.value]
    there.in_proj_weight.copy_(torch.cat([part.weight for part in asked]))
    there.in_proj_bias.copy_(torch.cat([part.bias for part in asked]))
    copy(here.output, there.out_proj)


@torch.no_grad()
def theirs(model: EncoderDecoder) -> nn.Transformer:
    """torch's own Transformer with our weights; post-norm blocks end without one more norm."""
    config = model.config
    made = nn.Transformer(
        SIZE,
        HEADS,
        config.encoder_layers,
        config.decoder_layers,
        INNER,
        dropout=0.0,
        activation=config.activation,
        batch_first=True,
        norm_first=config.norm_first,
        dtype=torch.float64,
    )
    for stack, their_stack in ((model.encoder, made.encoder), (model.decoder, made.decoder)):
        for here, there in zip(stack.blocks, their_stack.layers, strict=True):
            block: Any = here
            layer: Any = there
            copy_attention(block.attention, layer.self_attn)
            copy(block.feed_forward.up, layer.linear1)
            copy(block.feed_forward.down, layer.linear2)
            norms = [block.attention_norm, block.feed_forward_norm]
            if hasattr(block, "cross"):
                copy_attention(block.cross, layer.multihead_attn)
                norms.insert(1, block.cross_norm)
            for place, norm in enumerate(norms, 1):
                copy(norm, getattr(layer, f"norm{place}"))
        if config.norm_first:
            copy(stack.norm, their_stack.norm)
        else:
            their_stack.norm = None
    return made.train()  # in evaluation mode torch takes another path, with a warning


def texts() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    source, target = torch.randint(VOCAB, (4, 7)), torch.randint(VOCAB, (4, 5))
    mask = torch.arange(7) < torch.tensor([[7], [3], [1], [6]])
    return source, target, mask


def embedded(model: EncoderDecoder, ids: Tensor) -> Tensor:
    """Token and wave, written out from the paper's formulas."""
    out: Tensor = model.embedding(ids) * SIZE**0.5
    for place in range(ids.shape[1]):
        for i in range(0, SIZE, 2):
            angle = torch.tensor(place / 10000.0 ** (i / SIZE), dtype=torch.float64)
            out[:, place, i] += angle.sin()
            out[:, place, i + 1] += angle.cos()
    return out


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("norm_first", "activation"), KINDS)
def test_the_whole_with_its_gradients(norm_first: bool, activation: str, padded: bool) -> None:
    model = ours(norm_first, activation)
    other = theirs(model)
    source, target, mask = texts()
    hidden, _ = model.decode(
        target,
        model.encode(source, mask if padded else None),
        mask if padded else None,
    )
    ignored = ~mask if padded else None
    expected = other(
        embedded(model, source),
        embedded(model, target),
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64),
        src_key_padding_mask=ignored,
        memory_key_padding_mask=ignored,
        tgt_is_causal=True,
    )
    assert_close(hidden, expected, atol=1e-10)
    weights = torch.randn_like(hidden)
    parts: Any = model
    (found,) = torch.autograd.grad(
        (hidden * weights).sum(), parts.encoder.blocks[0].feed_forward.up.weight
    )
    layer: Any = other.encoder.layers[0]
    (wanted,) = torch.autograd.grad((expected * weights).sum(), layer.linear1.weight)
    assert float(found.abs().max()) > 1e-3
    assert_close(found, wanted, atol=1e-9)


@pytest.mark.parametrize(("norm_first", "activation"), KINDS)
def test_the_encoder_with_padding(norm_first: bool, activation: str) -> None:
    model = ours(norm_first, activation)
    source, _, mask = texts()
    expected = theirs(model).encoder(embedded(model, source), src_key_padding_mask=~mask)
    assert_close(model.encode(source, mask)[mask], expected[mask], atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("norm_first", [True, False])
def test_one_block_each(norm_first: bool) -> None:
    """A layer alone: no embedding, no final norm, no other layer to hide behind."""
    model: Any = ours(norm_first, "relu")
    other: Any = theirs(model)
    x, memory = torch.randn(2, 5, SIZE).double(), torch.randn(2, 4, SIZE).double()
    out, _ = model.encoder.blocks[1](x, AttentionMask())
    assert_close(out, other.encoder.layers[1](x), atol=1e-11)
    block = model.decoder.blocks[2]
    out, _ = block(
        x, AttentionMask(causal=True), None, (block.cross.project(memory), AttentionMask())
    )
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    assert_close(out, other.decoder.layers[2](x, memory, tgt_mask=causal), atol=1e-11)
