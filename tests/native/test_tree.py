"""The kernels on trees: what crosses into the core is checked, and threads change nothing."""

from types import ModuleType
from typing import Any

import pytest
import torch

from lmhead.vocab.tree_makers import huffman

VOCAB, ROWS, WIDTH, FEW = 6, 4, 5, 3
TREE = huffman(torch.arange(1, VOCAB + 1)).tables


def sums_arguments() -> dict[str, Any]:
    return {
        "factors": torch.ones(7, dtype=torch.float64),
        "from_": torch.randn(ROWS, WIDTH),
        "a": torch.zeros(7, dtype=torch.int64),
        "b": torch.ones(7, dtype=torch.int64),
        "to": torch.zeros(3, WIDTH),
        "threads": 1,
    }


def best_arguments() -> dict[str, Any]:
    return {
        "hidden": torch.randn(ROWS, WIDTH),
        "weight": torch.randn(VOCAB - 1, WIDTH),
        "bias": torch.zeros(VOCAB - 1),
        "start": TREE.start,
        "child": TREE.child,
        "vocab": VOCAB,
        "values": torch.empty(ROWS, FEW, dtype=torch.float64),
        "ids": torch.empty(ROWS, FEW, dtype=torch.int64),
        "opened": torch.empty(ROWS, dtype=torch.int64),
        "threads": 1,
    }


BAD_SUMS: dict[str, tuple[dict[str, Any], str]] = {
    "threads": ({"threads": 0}, "threads must be at least 1"),
    "one per pair": ({"a": torch.zeros(6, dtype=torch.int64)}, "one entry per pair"),
    "widths": ({"to": torch.zeros(3, WIDTH + 1)}, "the same width"),
    "a too large": ({"a": torch.full((7,), ROWS)}, "a must be rows of from"),
    "b negative": ({"b": torch.full((7,), -1)}, "b must be rows of to"),
}
BAD_BEST: dict[str, tuple[dict[str, Any], str]] = {
    "threads": ({"threads": 0}, "threads must be at least 1"),
    "k": ({"values": torch.empty(ROWS, 7, dtype=torch.float64)}, "k must be from 1 to vocab"),
    "opened": ({"opened": torch.empty(1, dtype=torch.int64)}, "values and ids must be"),
    "weight": ({"weight": torch.randn(VOCAB, WIDTH)}, "vocab - 1 rows"),
    "width": ({"hidden": torch.randn(ROWS, WIDTH + 1)}, "the same width"),
    "bias": ({"bias": torch.zeros(VOCAB)}, "bias must have one entry per row"),
    "vocab": ({"vocab": VOCAB + 1}, "one branch less than nodes"),
    "no start": ({"start": torch.empty(0, dtype=torch.int64)}, "start must have an entry"),
    "a cycle": ({"child": TREE.child.clamp(max=VOCAB)}, "every token once"),
    "far off": ({"child": TREE.child + 1000}, "every token once"),
}


def paths_arguments() -> dict[str, Any]:
    return {
        "parent": TREE.parent,
        "branches": TREE.branch,
        "vocab": VOCAB,
        "tokens": torch.tensor([0, 5]),
        "ends": TREE.depth[[0, 5]].cumsum(0),
        "fork": torch.empty(int(TREE.depth[[0, 5]].sum()), dtype=torch.int64),
        "branch": torch.empty(int(TREE.depth[[0, 5]].sum()), dtype=torch.int64),
    }


BAD_PATHS: dict[str, tuple[dict[str, Any], str]] = {
    "branches": ({"branches": TREE.branch[1:]}, "one entry per node"),
    "vocab": ({"vocab": 100}, "one entry per node"),
    "one end per token": ({"tokens": torch.tensor([0])}, "one end per token"),
    "token": ({"tokens": torch.tensor([0, VOCAB])}, "tokens must be in the vocabulary"),
    "falling": ({"ends": TREE.depth[[0, 5]].cumsum(0).flip(0)}, "ends must not fall"),
    "lengths": ({"fork": torch.empty(1, dtype=torch.int64)}, "of one length"),
    "too short": ({"ends": TREE.depth[[0, 5]].cumsum(0) - 1}, "one entry per decision"),
    "another token": ({"tokens": torch.tensor([5, 0])}, "as long as ends says"),
    "no fork": ({"parent": TREE.parent + 1000}, "as long as ends says"),
}


@pytest.mark.parametrize(("change", "message"), BAD_PATHS.values(), ids=BAD_PATHS)
def test_paths_refuse(core: ModuleType, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core.tree_paths(**paths_arguments() | change)


@pytest.mark.parametrize(("change", "message"), BAD_SUMS.values(), ids=BAD_SUMS)
def test_sums_refuse(core: ModuleType, change: dict[str, Any], message: str) -> None:
    arguments = sums_arguments() | change
    before = arguments["to"].clone()
    with pytest.raises(ValueError, match=message):
        core.tree_sums(**arguments)
    assert torch.equal(arguments["to"], before)


@pytest.mark.parametrize(("change", "message"), BAD_BEST.values(), ids=BAD_BEST)
def test_best_refuses(core: ModuleType, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core.tree_best(**best_arguments() | change)


@pytest.mark.parametrize("name", ["from_", "to", "factors", "a"])
def test_sums_take_no_other_type(core: ModuleType, name: str) -> None:
    arguments = sums_arguments()
    arguments[name] = arguments[name].double() if name != "a" else arguments[name].int()
    if name == "factors":
        arguments[name] = arguments[name].float()
    with pytest.raises(TypeError):
        core.tree_sums(**arguments)
    arguments = sums_arguments()
    arguments["from_"] = torch.randn(WIDTH, ROWS).T
    with pytest.raises(TypeError):
        core.tree_sums(**arguments)


def test_threads_change_nothing(core: ModuleType) -> None:
    found = []
    for threads in (1, 2, 5):
        torch.manual_seed(0)
        sums, best = sums_arguments(), best_arguments()
        core.tree_sums(**sums | {"threads": threads})
        core.tree_best(**best | {"threads": threads})
        found.append((sums["to"], best["values"], best["ids"], best["opened"]))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


def test_the_search_opens_few_forks_of_a_peaked_tree(core: ModuleType) -> None:
    tree = huffman(1 / torch.arange(1, 5001)).tables
    hidden, weight = torch.randn(8, 32), torch.randn(4999, 32)
    values, ids = torch.empty(8, 1, dtype=torch.float64), torch.empty(8, 1, dtype=torch.int64)
    opened = torch.empty(8, dtype=torch.int64)
    core.tree_best(hidden, weight, None, tree.start, tree.child, 5000, values, ids, opened, 1)
    assert int(opened.max()) < 500
