"""Arguments of the core: checked on entry, never copied."""

from types import ModuleType
from typing import Any

import pytest
import torch

IDENTITY = (1.0, 0.0, False, 1.0, 0.0)
TOKENS, ROWS = 6, 10


def softmax_arguments() -> dict[str, Any]:
    return {
        "z": torch.randn(TOKENS, ROWS),
        "bias": torch.zeros(TOKENS),
        "map": (2.0, 0.0, False, 1.0, 0.0),
        "m": torch.full((ROWS,), -torch.inf),
        "s": torch.zeros(ROWS, dtype=torch.float64),
        "t": torch.zeros(ROWS, dtype=torch.float64),
        "lo": 0,
        "heap_values": torch.zeros(ROWS, 3),
        "heap_ids": torch.zeros(ROWS, 3, dtype=torch.int64),
        "heap_sizes": torch.zeros(ROWS, dtype=torch.int32),
        "rank_mine": torch.zeros(2, ROWS),
        "rank_slack": torch.zeros(2, ROWS),
        "rank_per_norm": torch.zeros(ROWS),
        "rank_norms": torch.ones(TOKENS),
        "rank_counts": torch.zeros(2, ROWS, dtype=torch.int64),
        "threads": 1,
    }


def gradient_arguments() -> dict[str, Any]:
    return {
        "z": torch.randn(TOKENS, ROWS),
        "high": torch.zeros(ROWS),
        "low": torch.zeros(ROWS),
        "a": torch.ones(ROWS),
        "b": torch.ones(ROWS),
        "mix": torch.ones(TOKENS),
        "mixed": torch.ones(ROWS),
        "map": IDENTITY,
        "pick_tokens": torch.zeros(4, dtype=torch.int64),
        "pick_rows": torch.zeros(4, dtype=torch.int64),
        "pick_values": torch.ones(4),
        "token_sums": torch.zeros(TOKENS),
        "row_sums": torch.zeros(ROWS),
        "threads": 1,
    }


def pairs_arguments() -> dict[str, Any]:
    return {
        "hidden": torch.randn(ROWS, 5),
        "weight": torch.randn(TOKENS, 5),
        "rows": torch.zeros(7, dtype=torch.int64),
        "ids": torch.zeros(7, dtype=torch.int64),
        "out": torch.zeros(7, dtype=torch.float64),
        "threads": 1,
    }


def row_logits_arguments() -> dict[str, Any]:
    return {
        "hidden": torch.randn(ROWS, 5),
        "weight": torch.randn(TOKENS, 5),
        "out": torch.zeros(ROWS, TOKENS, dtype=torch.float64),
        "threads": 1,
    }


def product_arguments() -> dict[str, Any]:
    return {
        "left": torch.randn(ROWS, 5),
        "right": torch.randn(5, TOKENS),
        "out": torch.zeros(ROWS, TOKENS),
        "transposed": False,
        "add": False,
        "threads": 1,
    }


def scatter_arguments() -> dict[str, Any]:
    return {
        "into": torch.zeros(TOKENS, 5),
        "ids": torch.tensor([4, 1]),
        "from_": torch.ones(2, 5),
        "threads": 1,
    }


ARGUMENTS = {
    "softmax": softmax_arguments,
    "gradient": gradient_arguments,
    "pairs": pairs_arguments,
    "row_logits": row_logits_arguments,
    "product": product_arguments,
    "scatter_add": scatter_arguments,
}
OTHER_TYPES = {
    ("pairs", "weight"): {torch.float16},
    ("row_logits", "weight"): {torch.float16},
    ("row_logits", "out"): {torch.float32},
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
    taken = {right.dtype} | OTHER_TYPES.get((function, name), set())
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64):
        if dtype not in taken:
            with pytest.raises((TypeError, ValueError), match=r"incompatible|must be"):
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
    alone = {
        "bias",
        "t",
        "heap_values",
        "rank_mine",
        "b",
        "pick_tokens",
        "token_sums",
        "squared",
        "row_sums",
    }
    if name in alone:
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
        ("gradient", "pick_tokens", TOKENS),
        ("gradient", "pick_rows", ROWS),
        ("pairs", "rows", ROWS),
        ("pairs", "ids", TOKENS),
        ("scatter_add", "ids", TOKENS),
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
        "heap_values": torch.zeros(ROWS, 0),
        "heap_ids": torch.zeros(ROWS, 0, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match="kept at least 1"):
        call(core, "softmax", **no_room)
    for size in (-1, 4):
        sizes = torch.full((ROWS,), size, dtype=torch.int32)
        with pytest.raises(ValueError, match="from 0 to kept"):
            call(core, "softmax", heap_sizes=sizes)


def test_empty_tiles_are_no_work(core: ModuleType) -> None:
    for tokens, rows in ((0, 9), (4, 0)):
        s = torch.zeros(rows, dtype=torch.float64)
        nothing = (None,) * 8
        core.softmax(
            torch.zeros(tokens, rows), None, IDENTITY, torch.ones(rows), s, None, 0, *nothing, 2
        )
        assert (s == 0).all()


def test_results_are_written_where_they_were_asked_for(core: ModuleType) -> None:
    written = {
        "softmax": ("z", "m", "s", "t", "heap_values", "heap_ids", "heap_sizes", "rank_counts"),
        "gradient": ("z", "token_sums", "row_sums"),
        "pairs": ("out",),
        "row_logits": ("out",),
        "product": ("out",),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_taken_as_it_is(core: ModuleType, dtype: torch.dtype) -> None:
    arguments = pairs_arguments()
    half = {name: arguments[name].to(dtype) for name in ("hidden", "weight")}
    core.pairs(**{**arguments, **half})
    expected = (half["weight"][0].double() * half["hidden"][0].double()).sum()
    assert torch.allclose(arguments["out"], expected)
    other = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    with pytest.raises(ValueError, match="of the type of weight"):
        core.pairs(**{**arguments, **half, "hidden": half["hidden"].to(other)})
