"""Trees over tokens: how they are made, read and written, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmhead import reference as ref
from lmhead.vocab.tree import Tree
from lmhead.vocab.tree_files import read_tree
from lmhead.vocab.tree_makers import balanced, huffman
from vocab.trees import branches, chain, rows

counts_of_words = st.lists(st.integers(0, 50), min_size=1, max_size=40).filter(any)


@pytest.mark.both_cores
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts_of_words, st.integers(2, 5))
def test_huffman_is_the_textbooks(counts: list[int], arity: int) -> None:
    expected = ref.decision_tree(ref.huffman_nested(counts, arity))
    tree = huffman(counts, arity=arity)
    assert branches(tree) == expected.paths
    assert rows(tree) == expected.rows


@given(st.integers(1, 200), st.integers(2, 7))
def test_balanced_trees_differ_in_depth_by_one(vocab: int, arity: int) -> None:
    tree = balanced(vocab, arity=arity)
    depth = tree.depths
    assert int(depth.max()) - int(depth.min()) <= 1
    assert int(depth.max()) == int(np.ceil(round(np.log(vocab) / np.log(arity), 9)))
    assert bool((depth.diff() >= 0).all()), "low ids come first"


@given(counts_of_words, st.integers(2, 5))
def test_tables_agree_with_each_other(counts: list[int], arity: int) -> None:
    tree = huffman(counts, arity=arity)
    tables, vocab = tree.tables, tree.vocab
    assert int(tables.first_row[-1]) == vocab - 1
    lengths = [len(path) for path in branches(tree)]
    assert lengths == tree.depths.tolist()
    for fork in range(tree.forks):
        children = tables.child[tables.start[fork] : tables.start[fork + 1]]
        assert tables.parent[children].eq(fork).all()
        assert tables.depth[children].eq(tables.depth[vocab + fork] + 1).all()
    forks_by_level = tables.depth[vocab:].bincount().tolist() if tree.forks else []
    assert np.diff(tree.levels).tolist() == forks_by_level


@given(counts_of_words, st.integers(2, 5))
def test_a_tree_comes_back_from_json_and_from_its_parents(counts: list[int], arity: int) -> None:
    tree = huffman(counts, arity=arity)
    assert Tree.from_parents(tree.vocab, tree.parents) == tree
    if tree.forks:
        assert read_tree(json.loads(tree.to_json()), tree.vocab) == tree


def test_nested_lists_and_forks_are_the_same_tree(tmp_path: Path) -> None:
    nested = read_tree([[0, 1, 4], [2, 3]], 5)
    flat = read_tree({"forks": [[-1, -2], [0, 1, 4], [2, 3]]}, 5)
    assert nested == flat
    assert nested != read_tree([[2, 3], [0, 1, 4]], 5)
    for name, content in (("a.json", "[[0, 1, 4], [2, 3]]"), ("b.json", flat.to_json())):
        (tmp_path / name).write_text(content)
        assert read_tree(tmp_path / name, 5) == flat
        assert read_tree(str(tmp_path / name), 5) == flat
    flat.save(tmp_path / "c.json")
    assert read_tree(tmp_path / "c.json", 5) == flat
    assert read_tree(flat, 5) is flat


def test_a_single_token_needs_no_fork() -> None:
    for tree in (read_tree(0, 1), read_tree({"forks": []}, 1), balanced(1), huffman([3])):
        assert tree.forks == 0
        assert tree.depths.tolist() == [0]
        assert len(tree.paths(torch.tensor([0, 0])).fork) == 0
        assert repr(tree) == "Tree(1 token, no forks)"


@pytest.mark.both_cores
def test_a_chain_of_2000() -> None:
    tree = chain(2000)
    assert tree.depths.tolist() == [*range(1, 2000), 1999]
    steps = tree.paths(torch.tensor([1999, 0]))
    assert steps.fork.tolist() == [*range(1999), 0]
    assert steps.branch.tolist() == [1] * 1999 + [0]
    nested: Any = [1998, 1999]
    for token in reversed(range(1998)):
        nested = [token, nested]
    assert read_tree(nested, 2000) == tree


def test_a_deeply_nested_file_says_how_to_write_it(tmp_path: Path) -> None:
    depth = 200_000
    file = tmp_path / "deep.json"
    file.write_text("[0," * depth + "0" + "]" * depth)
    with pytest.raises(ValueError, match=r"nested too deeply.*forks"):
        read_tree(file, 5)


def test_tokens_never_met_form_a_balanced_subtree() -> None:
    tree = huffman([0] * 1024 + [1000, 500])
    assert tree.depths[-2:].tolist() == [1, 2]
    assert set(tree.depths[:1024].tolist()) == {12}


LOOP: list[Any] = [0, 1]
LOOP.append(LOOP)
SHARED: list[Any] = [0, 1]

BAD: dict[str, tuple[Any, str]] = {
    "missing word": ([[0, 1], 3], r"every token of \[0, 4\); it misses 1, the first is 2"),
    "word twice": ([[0, 1], [2, 3, 1]], "every token once; 1 occurs 2 times"),
    "id too large": ([[0, 1], [2, 4]], r"a token in \[0, 4\); got 4"),
    "negative id": ([[0, 1], [2, -3]], r"a token in \[0, 4\); got -3"),
    "one branch": ([[0, 1], [2, [3]]], "at least 2 branches; fork 3 has 1"),
    "no branch": ([[0, 1], 2, 3, []], "at least 2 branches; fork 2 has 0"),
    "a list in itself": (LOOP, "same list is a branch of two forks, or of itself"),
    "a list twice": ([SHARED, SHARED], "same list is a branch of two forks"),
    "a word alone": (0, "single token must be 0 of 1; got 0 of 4"),
    "other keys": ({"tree": []}, "key \"forks\" alone; got .'tree'."),
    "no forks": ({"forks": []}, "must have forks for 4 tokens"),
    "fork twice": ({"forks": [[-1, -1], [0, 1, 2, 3]]}, "fork 1 is a branch of 2 forks"),
    "fork nowhere": ({"forks": [[0, 1], [2, 3]]}, "fork 1 is a branch of 0 forks"),
    "cycle": ({"forks": [[0, 1], [-2, 2], [-1, 3]]}, "fork 1 is on a cycle"),
    "fork too large": ({"forks": [[-2, 0], [1, 2, 3]]}, r"or fork -1 to -1; got -2"),
    "no file": ("hufman", "'huffman', 'balanced', or an existing file; got 'hufman'"),
    "another vocabulary": (balanced(5), "over 4 tokens; got one over 5"),
}
BAD_TYPES: dict[str, tuple[Any, str]] = {
    "a word as text": ([[0, "one"], [2, 3]], "token's id or a list; got str"),
    "a bool": ([[0, True], [2, 3]], "token's id or a list; got bool"),
    "a number": (1.5, "nested lists.*got float"),
    "forks not in lists": ({"forks": [0, 1]}, "list of lists"),
}


@pytest.mark.parametrize(("tree", "message"), BAD.values(), ids=BAD)
def test_what_is_not_a_tree_is_refused(tree: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_tree(tree, 4)


@pytest.mark.parametrize(("tree", "message"), BAD_TYPES.values(), ids=BAD_TYPES)
def test_what_is_not_a_description_is_refused(tree: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        read_tree(tree, 4)


@pytest.mark.parametrize("content", ["[[0, 1], 2", "\xff", ""])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tree.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"tree\.json must hold a tree in JSON"):
        read_tree(file, 3)


def test_a_folder_is_no_tree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tree must be a JSON file that can be read; got"):
        read_tree(tmp_path, 3)


FREQUENCIES: dict[str, tuple[Any, type[Exception], str]] = {
    "negative": ([1.0, -1.0], ValueError, "at least 0; got -1.0 for token 1"),
    "nan": ([float("nan"), 1.0], ValueError, "finite and at least 0; got nan for token 0"),
    "inf": ([1.0, float("inf")], ValueError, "finite and at least 0; got inf for token 1"),
    "all zero": ([0, 0], ValueError, "must not all be 0"),
    "none": ([], ValueError, "number of frequencies must be at least 1; got 0"),
    "a matrix": (torch.ones(2, 2), ValueError, r"one entry per token, \(2,\); got \(2, 2\)"),
    "words": (["a", "b"], TypeError, "must be numbers, one per token; got 'a' for token 0"),
    "one is missing": (
        [1, None],
        TypeError,
        "must be numbers, one per token; got None for token 1",
    ),
}


@pytest.mark.parametrize(("given", "error", "message"), FREQUENCIES.values(), ids=FREQUENCIES)
def test_frequencies_are_checked(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        huffman(given)


@pytest.mark.parametrize("arity", [1, 0, -2, 2.0, True])
def test_arity_is_checked(arity: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="arity must be"):
        balanced(5, arity=arity)


PARENTS: dict[str, tuple[Any, str]] = {
    "shape": (torch.zeros(7), r"shape \(tokens and forks, 2\)"),
    "too few": (torch.zeros(3, 2), "for 4 tokens"),
    "no root": (torch.zeros(7, 2), "one root, a fork; got 0"),
    "two roots": (torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [-1, 0], [-1, 0]]), "got 2"),
    "no such fork": (torch.tensor([[0, 0], [0, 1], [9, 0], [1, 1], [-1, 0], [0, 2]]), "got 9"),
    "places": (torch.tensor([[0, 0], [0, 1], [1, 0], [1, 2], [-1, 0], [0, 2]]), "places 0, 1, 2"),
    "cycle": (
        torch.tensor([[0, 0], [0, 1], [1, 0], [2, 0], [-1, 0], [2, 1], [1, 1]]),
        "on a cycle",
    ),
}


@pytest.mark.parametrize(("parents", "message"), PARENTS.values(), ids=PARENTS)
def test_a_damaged_checkpoint_is_refused(parents: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree.from_parents(4, parents)
