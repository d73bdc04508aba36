"""What crosses into the core: checked at the door, never copied."""

from types import ModuleType
from typing import Any

import pytest
import torch

IDENTITY = (1.0, 0.0, False, 1.0, 0.0)
WORDS, TOKENS = 6, 10


def softmax_arguments() -> dict[str, Any]:
    return {
        "z": torch.randn(WORDS, TOKENS),
        "bias": torch.zeros(WORDS),
        "map": (2.0, 0.0, False, 1.0, 0.0),
        "m": torch.full((TOKENS,), -torch.inf),
        "s": torch.zeros(TOKENS, dtype=torch.float64),
        "t": torch.zeros(TOKENS, dtype=torch.float64),
        "lo": 0,
        "heap_values": torch.zeros(TOKENS, 3),
        "heap_ids": torch.zeros(TOKENS, 3, dtype=torch.int64),
        "heap_sizes": torch.zeros(TOKENS, dtype=torch.int32),
        "rank_mine": torch.zeros(2, TOKENS),
        "rank_slack": torch.zeros(2, TOKENS),
        "rank_per_norm": torch.zeros(TOKENS),
        "rank_norms": torch.ones(WORDS),
        "rank_counts": torch.zeros(2, TOKENS, dtype=torch.int64),
        "threads": 1,
    }


def gradient_arguments() -> dict[str, Any]:
    return {
        "z": torch.randn(WORDS, TOKENS),
        "high": torch.zeros(TOKENS),
        "low": torch.zeros(TOKENS),
        "a": torch.ones(TOKENS),
        "b": torch.ones(TOKENS),
        "mix": torch.ones(WORDS),
        "mixed": torch.ones(TOKENS),
        "map": IDENTITY,
        "pick_words": torch.zeros(4, dtype=torch.int64),
        "pick_tokens": torch.zeros(4, dtype=torch.int64),
        "pick_values": torch.ones(4),
        "columns": torch.zeros(WORDS),
        "rows": torch.zeros(TOKENS),
        "threads": 1,
    }


def loss_arguments() -> dict[str, Any]:
    return {
        "z": torch.randn(WORDS, TOKENS),
        "bias": torch.zeros(WORDS),
        "map": IDENTITY,
        "targets": torch.zeros(TOKENS, dtype=torch.int64),
        "lse": torch.ones(TOKENS, dtype=torch.float64),
        "picked": torch.ones(TOKENS, dtype=torch.float64),
        "mixed": torch.ones(TOKENS, dtype=torch.float64),
        "squared": torch.ones(TOKENS, dtype=torch.float64),
        "mix": torch.ones(WORDS),
        "threads": 1,
    }


def pairs_arguments() -> dict[str, Any]:
    return {
        "hidden": torch.randn(TOKENS, 5),
        "weight": torch.randn(WORDS, 5),
        "rows": torch.zeros(7, dtype=torch.int64),
        "ids": torch.zeros(7, dtype=torch.int64),
        "out": torch.zeros(7, dtype=torch.float64),
        "threads": 1,
    }


def scatter_arguments() -> dict[str, Any]:
    return {
        "into": torch.zeros(WORDS, 5),
        "ids": torch.tensor([4, 1]),
        "from_": torch.ones(2, 5),
        "threads": 1,
    }


ARGUMENTS = {
    "softmax": softmax_arguments,
    "gradient": gradient_arguments,
    "loss": loss_arguments,
    "pairs_f32": pairs_arguments,
    "scatter_add": scatter_arguments,
}
TENSORS = [
    (function, name)
    for function, make in ARGUMENTS.items()
    for name, value in make().items()
    if isinstance(value, torch.Tensor)
]
EVERY_TENSOR = pytest.mark.parametrize(("function", "name"), TENSORS)


def call(core: ModuleType, function: str, **changed: Any) -> dict[str, Any]:
    arguments = {**ARGUMENTS[function](), **changed}
    getattr(core, function)(**arguments)
    return arguments


@pytest.mark.parametrize("function", ARGUMENTS)
def test_right_arguments_are_taken(core: ModuleType, function: str) -> None:
    call(core, function)


@EVERY_TENSOR
def test_a_wrong_type_is_refused(core: ModuleType, function: str, name: str) -> None:
    right = ARGUMENTS[function]()[name]
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64):
        if dtype != right.dtype:
            with pytest.raises(TypeError, match="incompatible function arguments"):
                call(core, function, **{name: right.to(dtype)})


@EVERY_TENSOR
def test_a_wrong_shape_is_refused(core: ModuleType, function: str, name: str) -> None:
    right = ARGUMENTS[function]()[name]
    longer = torch.zeros([*right.shape[:-1], right.shape[-1] + 1], dtype=right.dtype)
    with pytest.raises(ValueError, match=r"must|one entry per pair"):
        call(core, function, **{name: longer})
    if right.ndim == 2:
        with pytest.raises(ValueError, match="must"):
            call(core, function, **{name: right.T.contiguous()})
    with pytest.raises(TypeError, match="incompatible function arguments"):
        call(core, function, **{name: right[None]})


@EVERY_TENSOR
def test_what_is_not_contiguous_is_refused(core: ModuleType, function: str, name: str) -> None:
    right = ARGUMENTS[function]()[name]
    spaced = torch.stack([right, right], -1)[..., 0]
    assert spaced.shape == right.shape
    with pytest.raises(TypeError, match="order='C'"):
        call(core, function, **{name: spaced})


@EVERY_TENSOR
def test_none_is_taken_or_refused_but_never_read(
    core: ModuleType, function: str, name: str
) -> None:
    alone = {"bias", "t", "heap_values", "rank_mine", "b", "pick_words", "columns", "squared"}
    if name in alone or (name == "rows" and function == "gradient"):
        call(core, function, **{name: None})
    else:
        with pytest.raises((TypeError, ValueError), match=r"incompatible|must|go together"):
            call(core, function, **{name: None})


@pytest.mark.parametrize("function", ARGUMENTS)
@pytest.mark.parametrize("threads", [0, -1])
def test_there_is_at_least_one_thread(core: ModuleType, function: str, threads: int) -> None:
    with pytest.raises(ValueError, match="threads must be at least 1"):
        call(core, function, threads=threads)


@pytest.mark.parametrize(
    ("function", "name", "number"),
    [
        ("gradient", "pick_words", WORDS),
        ("gradient", "pick_tokens", TOKENS),
        ("loss", "targets", WORDS),
        ("pairs_f32", "rows", TOKENS),
        ("pairs_f32", "ids", WORDS),
        ("scatter_add", "ids", WORDS),
    ],
)
def test_numbers_out_of_range_are_refused(
    core: ModuleType, function: str, name: str, number: int
) -> None:
    for wrong in (-1, number):
        numbers = ARGUMENTS[function]()[name]
        numbers[-1] = wrong
        with pytest.raises(ValueError, match="must"):
            call(core, function, **{name: numbers})


def test_heaps_have_room_and_say_how_much_is_used(core: ModuleType) -> None:
    no_room = {
        "heap_values": torch.zeros(TOKENS, 0),
        "heap_ids": torch.zeros(TOKENS, 0, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match="kept at least 1"):
        call(core, "softmax", **no_room)
    for size in (-1, 4):
        sizes = torch.full((TOKENS,), size, dtype=torch.int32)
        with pytest.raises(ValueError, match="from 0 to kept"):
            call(core, "softmax", heap_sizes=sizes)


def test_empty_tiles_are_no_work(core: ModuleType) -> None:
    for words, tokens in ((0, 9), (4, 0)):
        s = torch.zeros(tokens, dtype=torch.float64)
        nothing = (None,) * 8
        core.softmax(
            torch.zeros(words, tokens), None, IDENTITY, torch.ones(tokens), s, None, 0, *nothing, 2
        )
        assert (s == 0).all()


def test_results_are_written_where_they_were_asked_for(core: ModuleType) -> None:
    written = {
        "softmax": ("z", "m", "s", "t", "heap_values", "heap_ids", "heap_sizes", "rank_counts"),
        "gradient": ("z", "columns", "rows"),
        "pairs_f32": ("out",),
        "scatter_add": ("into",),
    }
    for function, names in written.items():
        torch.manual_seed(0)
        before = ARGUMENTS[function]()
        torch.manual_seed(0)
        places = {name: value.data_ptr() for name, value in before.items() if name in names}
        kept = {name: value.clone() for name, value in before.items() if name in names}
        getattr(core, function)(**before)
        for name in names:
            assert before[name].data_ptr() == places[name]
            assert not torch.equal(before[name], kept[name]), f"{function} did not write {name}"


def test_bfloat16_crosses_as_its_bits(core: ModuleType) -> None:
    arguments = pairs_arguments()
    half = {name: arguments[name].bfloat16() for name in ("hidden", "weight")}
    with pytest.raises(TypeError, match="incompatible function arguments"):
        core.pairs_bf16(**{**arguments, **half})
    core.pairs_bf16(**{**arguments, **{n: t.view(torch.uint16) for n, t in half.items()}})
    expected = (half["weight"][0].double() * half["hidden"][0].double()).sum()
    assert torch.allclose(arguments["out"], expected)
