"""The Llama body: Hugging Face's hidden states, from the cache and behind padding too."""

import os
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead.nn import LlamaBody, LlamaConfig

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB, SIZE, INNER, LAYERS, HEADS, THETA, EPS = 61, 16, 24, 3, 4, 500.0, 1e-4

NAMES = {  # theirs to ours
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.output",
    "mlp.gate_proj": "feed_forward.gate",
    "mlp.up_proj": "feed_forward.up",
    "mlp.down_proj": "feed_forward.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
}


def theirs(groups: int, head_dim: int | None = None) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=groups,
        head_dim=head_dim or SIZE // HEADS,
        max_position_embeddings=256,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():  # far from flat, so that nothing hides
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.4)
    return model.model


def interleave(weight: Tensor, heads: int) -> Tensor:
    """Rows (i, i + d/2) of every head become (2i, 2i + 1)."""
    halves = weight.view(heads, 2, -1, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def ours(model: Any, groups: int, rotary: Any, head_dim: int | None = None) -> LlamaBody:
    config = LlamaConfig(
        VOCAB,
        SIZE,
        INNER,
        LAYERS,
        HEADS,
        groups,
        head_dim=head_dim,
        rope_theta=THETA,
        rms_norm_eps=EPS,
        rotary=rotary,
    )
    state = {}
    for name, value in model.state_dict().items():
        renamed = name.replace("layers.", "blocks.").replace("embed_tokens", "embedding")
        for old, new in NAMES.items():
            renamed = renamed.replace(old, new)
        if rotary == "interleaved" and renamed.endswith(("query.weight", "key.weight")):
            value = interleave(value, HEADS if "query" in renamed else groups)
        state[renamed] = value
    body = LlamaBody(config).double()
    body.load_state_dict(state)
    return body


def padded_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(VOCAB, (3, 9))
    mask = torch.arange(9) >= torch.tensor([[0], [4], [8]])
    return ids, mask


@pytest.mark.parametrize("rotary", ["half", "interleaved"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@torch.no_grad()
def test_hidden_states_are_those_of_hugging_face(groups: int, rotary: str) -> None:
    model = theirs(groups)
    ids, _ = padded_batch()
    hidden, cache = ours(model, groups, rotary)(ids)
    # Hugging Face computes the angles in float32.
    assert_close(hidden, model(ids).last_hidden_state, atol=1e-5, dtype=torch.float64)
    assert cache.length == 9
    assert cache.keys[0].shape == (3, groups, 9, SIZE // HEADS)


@torch.no_grad()
def test_a_head_size_of_its_own() -> None:
    model = theirs(2, head_dim=6)
    ids, _ = padded_batch()
    hidden, _ = ours(model, 2, "half", head_dim=6)(ids)
    assert_close(hidden, model(ids).last_hidden_state, atol=1e-5)


@torch.no_grad()
def test_left_padding_is_that_of_hugging_face() -> None:
    model = theirs(2)
    ids, mask = padded_batch()
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(ids, attention_mask=mask.long(), position_ids=positions).last_hidden_state
    hidden, _ = ours(model, 2, "interleaved")(ids, None, mask)
    assert_close(hidden[mask], expected[mask], atol=1e-5)
    assert bool(hidden.isfinite().all())


def body(groups: int = 2) -> LlamaBody:
    torch.manual_seed(0)
    made = LlamaBody(LlamaConfig(VOCAB, SIZE, INNER, LAYERS, HEADS, groups)).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.4)
    return made.requires_grad_(False)


def test_a_padded_row_is_the_row_alone() -> None:
    ids, mask = padded_batch()
    hidden, _ = body()(ids, None, mask)
    for row in range(3):
        alone, _ = body()(ids[row : row + 1, mask[row]])
        assert_close(hidden[row, mask[row]], alone[0], atol=1e-12)


def test_padding_is_not_seen() -> None:
    ids, mask = padded_batch()
    others = torch.where(mask, ids, (ids + 7) % VOCAB)
    assert_close(body()(others, None, mask)[0][mask], body()(ids, None, mask)[0][mask])


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5, 6, 7, 8), (4,), (3, 8)])
def test_reading_in_pieces_is_reading_at_once(cuts: tuple[int, ...]) -> None:
    ids, mask = padded_batch()
    whole, _ = body()(ids, None, mask)
    cache, pieces = None, []
    for begin, end in zip((0, *cuts), (*cuts, 9), strict=True):
        hidden, cache = body()(ids[:, begin:end], cache, mask[:, :end])
        pieces.append(hidden)
    assert_close(torch.cat(pieces, 1)[mask], whole[mask], atol=1e-12)


def test_selected_rows_go_on_as_those_rows() -> None:
    ids, mask = padded_batch()
    rows = torch.tensor([2, 0, 2])
    _, cache = body()(ids[:, :7], None, mask[:, :7])
    hidden, longer = body()(ids[rows, 7:], cache.select(rows), mask[rows])
    whole, _ = body()(ids, None, mask)
    mask = mask[rows][:, 7:]
    assert_close(hidden[mask], whole[rows, 7:][mask], atol=1e-12)
    # The first cache is as it was: a text can go on from it twice.
    assert (cache.length, longer.length) == (7, 9)
    again, _ = body()(ids[rows, 7:], cache.select(rows), torch.ones(3, 9, dtype=torch.bool))
    assert again.shape == hidden.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    ids, mask = padded_batch()
    truth, _ = body()(ids, None, mask)
    hidden, cache = body().to(dtype)(ids, None, mask)
    assert cache.values[0].dtype == dtype
    exact = dtype == torch.float32
    assert_close(hidden[mask], truth[mask], atol=1e-4 if exact else 0.5, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads, 3; got 4"),
        ({"hidden_size": 18}, "hidden_size must be a multiple of num_attention_heads, 4; got 18"),
        ({"hidden_size": 12}, "head_dim must be even for rotary positions; got 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1; got 0"),
        ({"rotary": "spiral"}, "rotary must be 'half' or 'interleaved'; got 'spiral'"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
    }
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**(sizes | changes))


def test_arguments_that_do_not_fit() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match=r"ids must be in \[0, 61\); got 61"):
        body()(ids + 61)
    with pytest.raises(ValueError, match=r"ids must have shape \(B, T\); got \(3,\)"):
        body()(ids[0])
    with pytest.raises(ValueError, match=r"mask must be bool and of shape \(2, 3\).*\(2, 4\)"):
        body()(ids, None, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"embedding must have a weight of shape \(61, 16\)"):
        LlamaBody(body().config, embedding=torch.nn.Embedding(61, 8))
