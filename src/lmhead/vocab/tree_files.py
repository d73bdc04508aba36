"""Read trees: nested lists, a list of forks, or a JSON file with either.

Nested   `[[0, 1], [2, [3, 4]]]`: a list is a fork, an integer is a token. A single token is `0`.
Forks    `{"forks": [[-1, 2], [0, 1]]}`: one list per fork, the root first; a branch is a token, or
         -f for fork f. Not limited in depth, unlike nested lists in JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from lmhead.vocab.tree import Tree


def read_tree(given: Any, vocab: int) -> Tree:
    """Return a tree from nested lists, `{"forks": ...}`, a JSON file of either, or a `Tree`.

    Args:
        given: the description.
        vocab: V; every token of [0, V) must occur once.

    Raises:
        ValueError, TypeError: it is not a tree over these tokens; the message says why.

    >>> read_tree([[0, 1], [2, [3, 4]]], vocab=5).depths
    tensor([2, 2, 2, 3, 3])
    >>> read_tree({"forks": [[-1, 2], [0, 1]]}, vocab=3).depths
    tensor([2, 2, 1])
    """
    if isinstance(given, str | Path):
        given = _read_json(Path(given))
    if isinstance(given, Tree):
        if given.vocab != vocab:
            raise ValueError(f"tree must be over {vocab} tokens; got one over {given.vocab}")
        return given
    if isinstance(given, dict):
        if set(given) != {"forks"}:
            raise ValueError(f'tree must have the key "forks" alone; got {sorted(map(str, given))}')
        forks = given["forks"]
        if not isinstance(forks, list | tuple) or not all(
            isinstance(f, list | tuple) for f in forks
        ):
            raise TypeError('"forks" of the tree must be a list of lists')
        lists = [[_branch(b, vocab, len(forks)) for b in fork] for fork in forks]
    elif isinstance(given, list | tuple | int) and not isinstance(given, bool):
        lists = _flatten(given, vocab)
    else:
        raise TypeError(
            'tree must be nested lists, {"forks": ...}, a JSON file of either, or a Tree; '
            f"got {type(given).__name__}"
        )
    start = np.cumsum([0, *map(len, lists)])
    child = np.array([branch for fork in lists for branch in fork], np.int64)
    return Tree.from_forks(vocab, start, child, 0)


def _flatten(nested: Any, vocab: int) -> list[list[int]]:
    """Convert nested lists to forks, each a list of tokens and V + forks; without recursion."""
    if isinstance(nested, int):
        if nested != 0 or vocab != 1:
            raise ValueError(
                f"a tree that is a single token must be 0 of 1; got {nested} of {vocab}"
            )
        return []
    lists: list[Any] = [nested]
    seen = {id(nested)}
    forks: list[list[int]] = []
    while len(forks) < len(lists):
        branches = []
        for branch in lists[len(forks)]:
            if isinstance(branch, list | tuple):
                if id(branch) in seen:
                    raise ValueError(
                        "tree must be a tree: the same list is a branch of two forks, or of itself"
                    )
                seen.add(id(branch))
                branches.append(vocab + len(lists))
                lists.append(branch)
            else:
                branches.append(_token(branch, vocab))
        forks.append(branches)
    return forks


def _branch(value: Any, vocab: int, forks: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and -forks < value < 0:
        return vocab - value
    return _token(value, vocab, f", or fork -1 to {1 - forks}" if forks > 1 else "")


def _token(value: Any, vocab: int, other: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(
            f"a branch of the tree must be a token's id or a list; got {type(value).__name__}"
        )
    if not 0 <= value < vocab:
        raise ValueError(
            f"a branch of the tree must be a token in [0, {vocab}){other}; got {value}"
        )
    return int(value)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"tree must be 'huffman', 'balanced', or an existing file; got {str(path)!r}"
        ) from None
    except OSError as error:  # a folder, or no permission
        raise ValueError(
            f"tree must be a JSON file that can be read; got {str(path)!r}: {error.strerror}"
        ) from None
    except RecursionError:
        raise ValueError(
            f'{path} is nested too deeply for JSON; write {{"forks": [...]}} instead'
        ) from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} must hold a tree in JSON; {error}") from None
