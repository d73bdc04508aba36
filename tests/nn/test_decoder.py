"""The language model: GPT-2's hidden states, cache, padding, lens, head, argument checks."""

import math
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor

from lmhead import LazyLogits, LMHead, generate
from lmhead.nn import DecoderConfig, DecoderLM
from lmhead.sampling import beam_search

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 61
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"activation": "gelu_tanh", "bias": True},
    "post-norm": {"position": "sinusoidal", "norm_first": False, "activation": "relu"},
    "llama": {"position": "rotary", "norm": "rms", "activation": "swiglu", "head_dim": 6},
    "grouped": {"position": "rotary", "num_key_value_heads": 2, "rotary": "interleaved"},
    "no positions": {"position": "none", "embedding_scale": 4.0, "num_key_value_heads": 1},
}


def config(**changes: Any) -> DecoderConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_length": 12,
    }
    return DecoderConfig(**(sizes | changes))


def model(**changes: Any) -> DecoderLM:
    torch.manual_seed(0)
    made = DecoderLM(config(**changes)).double()
    for parameter in made.parameters():  # far from flat, so that nothing hides
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.4)
    return made.requires_grad_(False)


@pytest.fixture(params=KINDS)
def any_model(request: pytest.FixtureRequest) -> DecoderLM:
    return model(**KINDS[request.param])


def padded_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(VOCAB, (3, 9)), torch.arange(9) >= torch.tensor([[0], [4], [8]])


@torch.no_grad()
def test_hidden_states_are_those_of_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2Model(
        transformers.GPT2Config(vocab_size=VOCAB, n_positions=12, n_embd=16, n_layer=3, n_head=4)
    )
    theirs = theirs.double().eval()
    ours = model(**KINDS["gpt2"])
    theirs.wte.weight.copy_(ours.body.embedding.weight)
    assert ours.body.position.weight is not None
    theirs.wpe.weight.copy_(ours.body.position.weight)
    pairs: list[tuple[Any, Any]] = [(theirs.ln_f, ours.body.norm)]
    for there, here in zip(theirs.h, ours.body.blocks, strict=True):
        assert isinstance(here, torch.nn.Module)
        parts: Any = here
        pairs += [(there.ln_1, parts.attention_norm), (there.ln_2, parts.feed_forward_norm)]
        asked = [parts.attention.query, parts.attention.key, parts.attention.value]
        # Their matrices are stored the other way round.
        there.attn.c_attn.weight.copy_(torch.cat([part.weight for part in asked]).T)
        there.attn.c_attn.bias.copy_(torch.cat([part.bias for part in asked]))
        for old, new in (
            (there.attn.c_proj, parts.attention.output),
            (there.mlp.c_fc, parts.feed_forward.up),
            (there.mlp.c_proj, parts.feed_forward.down),
        ):
            old.weight.copy_(new.weight.T)
            old.bias.copy_(new.bias)
    for old, new in pairs:
        old.weight.copy_(new.weight)
        old.bias.copy_(new.bias)
    ids, mask = padded_batch()
    assert_close(ours.hidden(ids), theirs(ids).last_hidden_state, atol=1e-10)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = theirs(ids, attention_mask=mask.long(), position_ids=positions).last_hidden_state
    assert_close(ours.body(ids, None, mask)[0][mask], expected[mask], atol=1e-10)


def test_a_padded_row_is_the_row_alone(any_model: DecoderLM) -> None:
    ids, mask = padded_batch()
    hidden, _ = any_model.body(ids, None, mask)
    assert bool(hidden.isfinite().all())
    for row in range(3):
        alone = any_model.hidden(ids[row : row + 1, mask[row]])
        assert_close(hidden[row, mask[row]], alone[0], atol=1e-11)
    others = torch.where(mask, ids, (ids + 7) % VOCAB)
    assert_close(any_model.body(others, None, mask)[0][mask], hidden[mask])


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5, 6, 7, 8), (4,), (3, 8)])
@pytest.mark.parametrize("padded", [False, True])
def test_reading_in_pieces_is_reading_at_once(
    any_model: DecoderLM, cuts: tuple[int, ...], padded: bool
) -> None:
    ids, mask = padded_batch()
    if not padded:
        mask = torch.ones_like(mask)
    whole, _ = any_model.body(ids, None, mask)
    cache, pieces = None, []
    for begin, end in zip((0, *cuts), (*cuts, 9), strict=True):
        hidden, cache = any_model.body(ids[:, begin:end], cache, mask[:, :end])
        pieces.append(hidden)
    assert_close(torch.cat(pieces, 1)[mask], whole[mask], atol=1e-11)


def test_no_token_sees_the_future(any_model: DecoderLM) -> None:
    ids, _ = padded_batch()
    other = ids.clone()
    other[:, 5:] = (ids[:, 5:] + 1) % VOCAB
    before, after = any_model.hidden(ids), any_model.hidden(other)
    assert_close(after[:, :5], before[:, :5], atol=1e-12)
    assert bool((after[:, 5:] - before[:, 5:]).abs().amax(-1).gt(1e-3).all())


def test_the_lens_ends_at_the_hidden_states(any_model: DecoderLM) -> None:
    ids, _ = padded_batch()
    layers = any_model.layers(ids)
    assert len(layers) == 4
    assert_close(layers[-1], any_model.hidden(ids))
    first = any_model.body.embedding(ids) * any_model.config.embedding_scale
    expected = any_model.body.norm(any_model.body.position(first, torch.arange(9)[None]))
    assert_close(layers[0], expected)


def test_generation_takes_the_model_as_it_is() -> None:
    lm = model()
    ids, _ = padded_batch()
    greedy = generate(lm, ids[:1, :4].tolist(), max_new_tokens=5)[0].tokens
    text = ids[:1, :4]
    for _ in range(5):
        text = torch.cat([text, lm(text)[:, -1].argmax(-1, keepdim=True)], 1)
    assert greedy == text[0, 4:].tolist()
    assert beam_search(lm, ids[:1, :4], num_beams=1, max_new_tokens=5).best[0] == greedy


def test_the_head() -> None:
    tied = DecoderLM(config(softcap=5.0, scale=0.5, head_bias=True))
    head: Any = tied.head
    assert head.weight is tied.body.embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())
    assert (head.softcap, head.scale, head.bias.abs().sum().item()) == (5, 0.5, 0)
    own: Any = DecoderLM(config(tied=False))
    assert own.head.weight is not own.body.embedding.weight
    assert own.head.bias is None
    logits = own(padded_batch()[0])
    assert isinstance(logits, LazyLogits)
    assert logits.shape == (3, 9, VOCAB)
    given = LMHead(16, VOCAB)
    assert DecoderLM(config(), head=given).head is given


@torch.no_grad()
def test_numbers_begin_as_in_gpt2() -> None:
    torch.manual_seed(0)
    wide = DecoderLM(config(hidden_size=256, vocab_size=1000, bias=True, head_bias=True))
    parts: Any = wide.body.blocks[0]
    for weight, std in (
        (wide.body.embedding.weight, 0.02),
        (parts.attention.query.weight, 0.02),
        (parts.feed_forward.up.weight, 0.02),
        (parts.attention.output.weight, 0.02 / math.sqrt(6)),
        (parts.feed_forward.down.weight, 0.02 / math.sqrt(6)),
    ):
        assert float(weight.std()) == pytest.approx(std, rel=0.03)
    assert float(parts.attention.query.bias.abs().sum()) == 0
    glorot: Any = DecoderLM(config(hidden_size=256, init="xavier")).body.blocks[0]
    bound = math.sqrt(6 / 512)
    assert float(glorot.attention.output.weight.abs().max()) == pytest.approx(bound, rel=0.01)
    torch.manual_seed(0)
    plain: Any = DecoderLM(config(init="torch"))
    torch.manual_seed(0)
    assert_close(plain.body.embedding.weight, torch.nn.Embedding(VOCAB, 16).weight)


def test_gradients_are_those_of_a_dense_head() -> None:
    ids, _ = padded_batch()
    ours = model().requires_grad_(True)
    loss = F.cross_entropy(ours(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    found = torch.autograd.grad(loss, list(ours.parameters()))
    dense = model().requires_grad_(True)
    logits = F.linear(dense.hidden(ids[:, :-1]), dense.body.embedding.weight)
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    expected = torch.autograd.grad(loss, list(dense.parameters()))
    for ours_grad, dense_grad in zip(found, expected, strict=True):
        assert_close(ours_grad, dense_grad, atol=1e-10)


def test_dropout_is_for_training_alone() -> None:
    torch.manual_seed(0)
    lm = DecoderLM(config(dropout=0.5, attention_dropout=0.5))
    ids, _ = padded_batch()
    assert float((lm.hidden(ids) - lm.hidden(ids)).detach().abs().max()) > 0.1
    lm.eval()
    assert_close(lm.hidden(ids), lm.hidden(ids))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, 3; got 4"),
        ({"hidden_size": 18}, "hidden_size must be a multiple of num_attention_heads, 4; got 18"),
        ({"position": "rotary", "head_dim": 3}, "head_dim must be even.*got 3"),
        ({"position": "sinusoidal", "hidden_size": 5, "head_dim": 2}, "hidden_size must be even"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1; got 0"),
        ({"activation": "tanh"}, "activation must be 'relu' or .*; got 'tanh'"),
        ({"norm": "batch"}, "norm must be 'layer' or 'rms'; got 'batch'"),
        ({"dropout": 1.5}, r"dropout must be in \[0, 1\]; got 1.5"),
        ({"softcap": 0.0}, "softcap must be above 0; got 0"),
        ({"init_std": -1.0}, "init_std must be above 0; got -1"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_arguments_that_do_not_fit() -> None:
    lm = model()
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"ids must be in \[0, 61\); got 61"):
        lm(ids + 61)
    with pytest.raises(ValueError, match=r"ids must have shape \(B, T\); got \(3,\)"):
        lm(ids[0])
    with pytest.raises(ValueError, match=r"mask must be bool and of shape \(2, 3\).*\(2, 4\)"):
        lm.body(ids, None, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"ids must be at most max_length, 12 tokens.*got 13"):
        lm(torch.zeros(1, 13, dtype=torch.long))
    mask = torch.arange(13) >= torch.tensor([[1]])
    hidden, _ = lm.body(torch.zeros(1, 13, dtype=torch.long), None, mask)
    assert hidden.shape == (1, 13, 16)  # padding needs no position


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (2, 0), (0, 3)])
def test_odd_shapes(any_model: DecoderLM, rows: int, length: int) -> None:
    ids = torch.zeros(rows, length, dtype=torch.long)
    assert any_model.hidden(ids).shape == (rows, length, 16)
    assert [layer.shape for layer in any_model.layers(ids)] == [(rows, length, 16)] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_training_in_half_precision(kind: str) -> None:
    """Under autocast, where queries and keys that were turned meet values that were not."""
    torch.manual_seed(0)
    lm = DecoderLM(config(**KINDS[kind]))
    ids, _ = padded_batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(lm(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    grads = torch.autograd.grad(loss, list(lm.parameters()))
    assert all(bool(grad.isfinite().all()) for grad in grads)
    exact = F.cross_entropy(lm(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)
