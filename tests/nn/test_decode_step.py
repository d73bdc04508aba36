"""One token at a time in the compiled core, against the torch operations."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead.nn import LlamaBody, LlamaConfig
from lmhead.nn.decode_step import BLOCK_TYPES, DecodeStep, GrowingCache, StoredBlocks, is_supported
from lmhead.sweep import kernels

SETS = [] if kernels.core is None else kernels.core.instruction_sets()
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(params=SETS or [None])
def instruction_set(request: pytest.FixtureRequest, served_by: str) -> Iterator[None]:
    if kernels.core is None or served_by == "torch":
        pytest.skip("these tests need the compiled core")
    before = kernels.core.instruction_set()
    kernels.core.use(request.param)
    yield
    kernels.core.use(before)


def body_of(**sizes: Any) -> LlamaBody:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "vocab_size": 50,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        **sizes,
    }
    body = LlamaBody(LlamaConfig(**given)).requires_grad_(False).eval()
    for norm in (body.norm, *(b.attention_norm for b in body.blocks)):
        norm.weight.copy_(torch.rand_like(norm.weight) + 0.5)  # type: ignore[operator, union-attr, arg-type]
    return body


def continued(body: LlamaBody, ids: Tensor) -> tuple[Tensor, Any]:
    """The hidden states of all but the first three ids, one by one, and the last cache."""
    with torch.no_grad():
        _, cache = body(ids[:, :3])
        states = []
        for i in range(3, ids.shape[1]):
            hidden, cache = body(ids[:, i : i + 1], cache)
            states.append(hidden)
    return torch.cat(states, 1), cache


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"rotary": "interleaved", "num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 6, "intermediate_size": 35, "hidden_size": 37},
        {"rope_factors": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), "rope_theta": 100.0},
    ],
)
def test_it_gives_the_hidden_states_of_torch(sizes: dict[str, Any]) -> None:
    body = body_of(**sizes)
    expected, cache = continued(body, IDS)
    body.step = DecodeStep(body)
    found, grown = continued(body, IDS)
    assert isinstance(grown, GrowingCache)
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(grown.keys + grown.values, cache.keys + cache.values, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("instruction_set")
def test_many_positions() -> None:
    body = body_of()
    ids = torch.randint(50, (1, 150))
    expected, _ = continued(body, ids)
    body.step = DecodeStep(body)
    assert_close(continued(body, ids)[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("type", BLOCK_TYPES)
def test_blocks_are_the_numbers_that_gguf_reads(type: str) -> None:
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(70, 96)
    kind = gguf.GGMLQuantizationType[type]
    packed = gguf.quants.quantize(weight.numpy(), kind)
    expected = torch.from_numpy(gguf.quants.dequantize(packed, kind))
    x = torch.cat([torch.eye(96), torch.randn(7, 96)])
    product = torch.full((len(x), 70), torch.nan)
    kernels.compiled().stored_product(torch.from_numpy(packed), type, x, product, 1)
    largest = float(expected.abs().max())
    assert_close(product[:96], expected.T.contiguous(), rtol=0, atol=1e-7 * largest)
    truth = x.double() @ expected.double().T
    size = x.double().abs() @ expected.double().abs().T
    assert ((product - truth).abs() <= 4e-7 * size).all()


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("type", ["F32", *BLOCK_TYPES])
def test_a_product_has_the_same_bits_beside_others(type: str) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(71, 96), torch.randn(23, 96)
    if type == "F32":
        weight, x = weight[:, :75].contiguous(), x[:, :75].contiguous()
    else:
        gguf = pytest.importorskip("gguf")
        kind = gguf.GGMLQuantizationType[type]
        weight = torch.from_numpy(gguf.quants.quantize(weight.numpy(), kind))
    core, alone = kernels.compiled(), torch.empty(1, 71)
    for count in (2, 3, 5, 8, 23):
        out = torch.full((count, 71), torch.nan)
        core.stored_product(weight, type, x[:count].contiguous(), out, 1)
        for row in range(count):
            core.stored_product(weight, type, x[row : row + 1].contiguous(), alone, 1)
            assert torch.equal(out[row], alone[0]), (count, row)


def test_a_body_with_blocks_gives_the_hidden_states_of_their_numbers() -> None:
    if kernels.core is None:
        pytest.skip("this test needs the compiled core")
    gguf = pytest.importorskip("gguf")
    body, kind = body_of(), gguf.GGMLQuantizationType.Q4_1
    blocks = {}
    for name, weight in body.named_parameters():
        if weight.dim() == 2 and name != "embedding.weight":
            packed = gguf.quants.quantize(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
            blocks[name] = StoredBlocks("Q4_1", torch.from_numpy(packed))
    expected, _ = continued(body, IDS)
    body.step = DecodeStep(body, blocks)
    assert_close(continued(body, IDS)[0], expected, atol=1e-5, rtol=1e-5)


class TestBody:
    @pytest.fixture
    def body(self, served_by: str) -> LlamaBody:
        if kernels.core is None or served_by == "torch":
            pytest.skip("these tests need the compiled core")
        body = body_of()
        body.step = DecodeStep(body)
        return body

    @torch.no_grad()
    def test_a_cache_can_be_continued_twice(self, body: LlamaBody) -> None:
        _, cache = body(IDS[:, :3])
        _, cache = body(IDS[:, 3:4], cache)
        first, once = body(torch.tensor([[7]]), cache)
        other, _ = body(torch.tensor([[8]]), cache)
        again, _ = body(torch.tensor([[7]]), cache)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        more, _ = body(torch.tensor([[9]]), once)
        alone, _ = body(torch.cat((IDS[:, :4], torch.tensor([[7, 9]])), 1))
        assert_close(more[:, -1], alone[:, -1], atol=1e-5, rtol=1e-5)

    @torch.no_grad()
    def test_two_threads_that_continue_a_cache_write_to_different_memory(
        self, body: LlamaBody
    ) -> None:
        _, cache = body(IDS[:, :3])
        _, cache = body(IDS[:, 3:4], cache)
        first, second = cache.writable_memory(), cache.writable_memory()
        assert first.keys.data_ptr() != second.keys.data_ptr()

    @torch.no_grad()
    def test_several_tokens_or_rows_after_it(self, body: LlamaBody) -> None:
        expected, _ = body(IDS)
        _, cache = body(IDS[:, :3])
        _, cache = body(IDS[:, 3:4], cache)
        rest, _ = body(IDS[:, 4:], cache)
        assert_close(rest, expected[:, 4:], atol=1e-5, rtol=1e-5)
        both = cache.select(torch.tensor([0, 0]))
        next, _ = body(IDS[:, 4:5].expand(2, 1), both)
        assert_close(next[1], expected[0, 4:5], atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("change", ["in place", "replaced", "hook", "training"])
    @torch.no_grad()
    def test_a_changed_body_is_left_to_torch(self, body: LlamaBody, change: str) -> None:
        _, cache = body(IDS[:, :3])
        layer: Any = body.blocks[1].attention
        if change == "in place":
            layer.query.weight.mul_(2.0)
        elif change == "replaced":
            layer.query = torch.nn.Linear(64, 64)
        elif change == "hook":
            layer.query.register_forward_hook(lambda *_: None)
        else:
            body.train()
        _, after = body(IDS[:, 3:4], cache)
        assert not isinstance(after, GrowingCache)

    def test_gradients_and_padding_are_left_to_torch(self, body: LlamaBody) -> None:
        _, cache = body(IDS[:, :3])
        assert not isinstance(body(IDS[:, 3:4], cache)[1], GrowingCache)
        with torch.no_grad():
            mask = torch.tensor([[False, True, True, True]])
            assert not isinstance(body(IDS[:, 3:4], cache, mask)[1], GrowingCache)

    def test_a_copy_is_without_it(self, body: LlamaBody) -> None:
        assert copy.deepcopy(body).step is None

    def test_ids_are_checked(self, body: LlamaBody) -> None:
        with torch.no_grad(), pytest.raises(ValueError, match=r"ids must be in \[0, 50\)"):
            body(torch.tensor([[50]]), body(IDS[:, :3])[1])


def test_what_is_supported() -> None:
    if kernels.core is None:
        pytest.skip("this test needs the compiled core")
    assert is_supported(body_of())
    assert not is_supported(body_of().double())
