"""`ScreenedHead`: shapes, certificates, guards, files."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lmhead import LMHead
from lmhead.screen import ScreenedHead
from screen import heads


@pytest.fixture
def weight() -> Tensor:
    return heads.plain(1000, 96, torch.Generator().manual_seed(0))


@pytest.fixture
def hidden() -> Tensor:
    return heads.normal(2, 3, 96, random=torch.Generator().manual_seed(1))


def test_shapes(weight: Tensor, hidden: Tensor) -> None:
    screened = ScreenedHead(heads.head_of(weight))
    for states, lead in ((hidden, (2, 3)), (hidden[0, 0], ()), (hidden[:0], (0, 3))):
        first, top = screened.argmax(states), screened.topk(states, 4)
        assert first.token.shape == first.certificate.rows_rescored.shape == lead
        assert top.values.shape == top.indices.shape == (*lead, 4)
        assert top.certificate.fell_back.shape == lead
        assert top.values.dtype == torch.float64
        assert first.token.dtype == top.indices.dtype == torch.int64


def test_a_batch_larger_than_one_pass(weight: Tensor) -> None:
    states = heads.normal(150, 96, random=torch.Generator().manual_seed(2))
    screened = ScreenedHead(heads.head_of(weight))
    together = screened.topk(states, 3)
    for i in (0, 63, 64, 149):
        alone = screened.topk(states[i], 3)
        assert torch.equal(alone.indices, together.indices[i])
        assert torch.equal(alone.values, together.values[i])


def test_values_are_the_float64_logits(weight: Tensor, hidden: Tensor) -> None:
    top = ScreenedHead(heads.head_of(weight, softcap=5.0, scale=0.5)).topk(hidden, 7)
    z = 5.0 * (0.5 * (hidden.double() @ weight.double().T) / 5.0).tanh()
    torch.testing.assert_close(top.values, z.gather(-1, top.indices), rtol=1e-13, atol=1e-13)


def test_ties_go_to_the_lowest_id(weight: Tensor) -> None:
    weight[[17, 400, 999]] = 10 * weight[3]
    answer = ScreenedHead(heads.head_of(weight)).topk(weight[3], 3)
    assert answer.indices.tolist() == [17, 400, 999]
    assert answer.certificate.rows_rescored.item() >= 3


def test_a_flat_row_falls_back_and_says_so(weight: Tensor) -> None:
    screened = ScreenedHead(heads.head_of(weight))
    states = torch.stack([weight[5], torch.zeros(96)])
    answer = screened.argmax(states)
    assert answer.token.tolist() == [5, 0]
    assert answer.certificate.fell_back.tolist() == [False, True]
    assert answer.certificate.rows_rescored[1] == 1000
    assert answer.certificate.fall_back_rate == 0.5
    assert answer.certificate.bytes_read > weight.nbytes


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 3e38])
def test_bad_states_are_answered_as_without_a_copy(weight: Tensor, bad: float) -> None:
    head = heads.head_of(weight)
    states = torch.stack([weight[5], torch.full((96,), bad)])
    answer = ScreenedHead(head).argmax(states)
    assert torch.equal(answer.token, head(states).argmax(-1))
    assert answer.certificate.fell_back.tolist() == [False, True]


def test_only_masked_tokens_give_no_token(weight: Tensor, hidden: Tensor) -> None:
    screened = ScreenedHead(heads.head_of(weight, torch.full((1000,), -torch.inf)))
    assert bool((screened.argmax(hidden).token == -1).all())


def test_more_tokens_asked_than_are_not_masked(weight: Tensor, hidden: Tensor) -> None:
    bias = torch.full((1000,), -torch.inf)
    bias[[5, 700]] = 0.0
    head = heads.head_of(weight, bias)
    assert torch.equal(ScreenedHead(head).topk(hidden, 4).indices, head(hidden).topk(4).indices)


def test_a_changed_weight_is_noticed(weight: Tensor, hidden: Tensor) -> None:
    head = heads.head_of(weight)
    screened = ScreenedHead(head)
    with torch.no_grad():
        head.weight.mul_(2)
    for ask in (screened.argmax, lambda h: screened.topk(h, 2), lambda _: screened.save("x")):
        with pytest.raises(RuntimeError, match="weight of the head has changed"):
            ask(hidden)


def test_a_weight_changed_behind_our_back_is_noticed(weight: Tensor, hidden: Tensor) -> None:
    head = heads.head_of(weight)
    screened = ScreenedHead(head)
    head.weight.data.mul_(0.5)  # torch does not count this as a change
    with pytest.raises(RuntimeError, match="outside its bounds"):
        screened.argmax(hidden)


def test_progress_and_size(weight: Tensor) -> None:
    seen: list[tuple[int, int]] = []
    screened = ScreenedHead(heads.head_of(weight), progress=lambda *at: seen.append(at))
    assert seen[-1] == (1000, 1000)
    assert 1000 * 128 < screened.nbytes < 1000 * 128 * 1.5 + 2**18
    assert "bits=8" in repr(screened)


def test_errors_name_the_argument(weight: Tensor, hidden: Tensor) -> None:
    head = heads.head_of(weight)
    with pytest.raises(TypeError, match="head must be an LMHead; got Linear"):
        ScreenedHead(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r'bits must be 8 or "4\+4"; got 4'):
        ScreenedHead(head, bits=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"calibration must have shape \(\.\.\., 96\)"):
        ScreenedHead(head, calibration=torch.zeros(3, 95))
    with pytest.raises(ValueError, match="calibration must be finite"):
        ScreenedHead(head, calibration=torch.full((3, 96), torch.nan))
    with pytest.raises(TypeError, match="calibration must be a floating tensor"):
        ScreenedHead(head, calibration=torch.zeros(3, 96, dtype=torch.int64))
    with pytest.raises(ValueError, match="low-rank"):
        ScreenedHead(LMHead(16, 20).add_low_rank(2))
    with pytest.raises(ValueError, match="on the CPU; got meta"):
        ScreenedHead(LMHead(16, 20, device="meta"))
    with pytest.raises(ValueError, match="weight must be finite"):
        ScreenedHead(heads.head_of(torch.full((3, 2), torch.nan)))
    screened = ScreenedHead(head)
    for k in (0, 1001):
        with pytest.raises(ValueError, match="k must be in"):
            screened.topk(hidden, k)
    with pytest.raises(ValueError, match="hidden must have shape"):
        screened.argmax(hidden[..., :5])


@pytest.mark.parametrize("bits", [8, "4+4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(
    weight: Tensor, hidden: Tensor, bits: object, dtype: torch.dtype, tmp_path: Path
) -> None:
    head = heads.head_of(weight.to(dtype))
    made = ScreenedHead(head, bits=bits)  # type: ignore[arg-type]
    made.save(tmp_path / "copy.safetensors")
    read = ScreenedHead.load(tmp_path / "copy.safetensors", head)
    assert read.bits == bits
    assert read.nbytes == made.nbytes
    states = hidden.to(dtype)
    before, after = made.topk(states, 5), read.topk(states, 5)
    assert torch.equal(before.values, after.values)
    assert torch.equal(before.indices, after.indices)
    assert before.certificate.bytes_read == after.certificate.bytes_read


def test_a_file_for_another_weight_is_refused(weight: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "copy.safetensors"
    ScreenedHead(heads.head_of(weight)).save(path)
    other = weight.clone()
    other[999, 95] = torch.nextafter(other[999, 95], torch.tensor(torch.inf))
    for wrong in (other, weight.double(), weight[:999]):
        with pytest.raises(ValueError, match="from a different weight"):
            ScreenedHead.load(path, heads.head_of(wrong))


def test_a_file_that_is_something_else_is_refused(weight: Tensor, tmp_path: Path) -> None:
    head = heads.head_of(weight)
    text, plain, newer = (tmp_path / name for name in ("text", "plain", "newer"))
    text.write_text("not tensors")
    save_file({"weight": weight}, plain)
    ScreenedHead(head).save(newer)
    meta = {"format": "lmhead-screen", "version": "3"}
    save_file(load_file(newer), newer, metadata=meta)
    for path, what in (
        (text, "not a safetensors"),
        (plain, "no copy"),
        (newer, "version 2; got 3"),
    ):
        with pytest.raises(ValueError, match=what):
            ScreenedHead.load(path, head)


def test_a_damaged_file_is_refused(weight: Tensor, tmp_path: Path) -> None:
    head, path = heads.head_of(weight), tmp_path / "copy"
    ScreenedHead(head).save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    for damage in (
        {"factor.0": tensors["factor.0"] * 1.001},
        {"basis": tensors["basis"] + 1},
        {"n": tensors["n"][1:]},
    ):
        save_file(tensors | damage, path, metadata=metadata)
        with pytest.raises(ValueError, match="is damaged"):
            ScreenedHead.load(path, head)
    del tensors["scales"]
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(ValueError, match="is damaged"):
        ScreenedHead.load(path, head)


@pytest.mark.parametrize("bits", [8, "4+4"])
def test_a_flipped_bit_anywhere_in_a_file_is_refused(
    weight: Tensor, tmp_path: Path, bits: Any
) -> None:
    head, path = heads.head_of(weight), tmp_path / "copy"
    ScreenedHead(head, bits=bits).save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    for name, tensor in load_file(path).items():
        damaged = load_file(path)
        damaged[name].view(-1).view(torch.uint8)[tensor.nbytes // 2] ^= 128
        other = tmp_path / name
        save_file(damaged, other, metadata=metadata)
        with pytest.raises(ValueError, match="is damaged"):
            ScreenedHead.load(other, head)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), copy.copy]
)
def test_copies_answer_for_the_weight_they_have(
    weight: Tensor, hidden: Tensor, duplicate: Callable[[Any], Any], attached: bool
) -> None:
    made = ScreenedHead(heads.head_of(weight.clone()))
    if attached:
        made.attach()
    want = made.argmax(hidden).token
    twin = duplicate(made.head).screened if attached else duplicate(made)
    assert torch.equal(twin.argmax(hidden).token, want)
    assert twin.fresh()
    changed = duplicate(made)
    with torch.no_grad():
        changed.head.weight.neg_()
    with pytest.raises(RuntimeError, match="has changed"):
        changed.argmax(hidden)


def test_a_copy_of_a_stale_copy_is_stale(weight: Tensor, hidden: Tensor) -> None:
    made = ScreenedHead(heads.head_of(weight.clone()))
    with torch.no_grad():
        made.head.weight.neg_()
    with pytest.raises(RuntimeError, match="has changed"):
        copy.deepcopy(made).argmax(hidden)


def test_a_transposed_weight_is_another() -> None:
    head = heads.head_of(torch.randn(64, 64))
    made = ScreenedHead(head)
    head.weight.data = head.weight.data.t()
    assert not made.fresh()


def test_weights_without_numbers_are_named(weight: Tensor) -> None:
    for odd, message in (
        (FakeTensorMode().from_tensor(weight), "FakeTensor"),
        (torch._efficientzerotensor(weight.shape), "ZeroTensor"),
        (torch._neg_view(weight), "negative view"),
    ):
        head = heads.head_of(weight)
        head.weight = torch.nn.Parameter(odd, requires_grad=False)
        with pytest.raises((ValueError, TypeError), match=message):
            ScreenedHead(head)
