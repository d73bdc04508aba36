"""Diverse beam search: groups that avoid each other's tokens (Vijayakumar et al., 2016).

Transformers had it until version 4 and gives it up in version 5: results of 4.50 are written down
here, and a slow twin that lists every candidate serves for the rest.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from huggingface_models import Wrapped, random_model, transformers, written_model
from torch import Tensor

from lmhead.sampling.beam import beam_search

ENDS = [3, 7, 10, 22, 40]
PAD = 5

# num_beams, groups, diversity_penalty, length_penalty, early_stopping, num_return_sequences:
# sequences without the id that ends them (transformers 4 put the first of all such ids there).
WRITTEN: list[tuple[Any, ...]] = [
    (
        (4, 2, 0.5, 1.0, False, 4),
        [
            *([29, 30, 32, 33, 35, 36], [29, 30, 32, 33, 35, 39]),
            *([26, 24, 58, 32, 33, 35], [26, 24, 58, 32, 33, 32]),
            *([6, 34], [9, 37, 2, 26, 24, 20], [9, 37, 2, 26, 24, 58], [6, 34, 37, 2, 26, 21]),
        ],
        [-2.3884, -2.391, -2.4443, -2.4497, -2.476, -2.5039, -2.5042, -2.5056],
    ),
    (
        (6, 3, 1.5, 0.0, True, 3),
        [
            *([29, 30, 32, 33, 35, 36], [29, 30, 32, 33, 35, 39], [26, 24, 58, 32, 33, 35]),
            *([], [9], [50]),
        ],
        [-14.3307, -14.3457, -14.6659, -2.7295, -5.0372, -5.2858],
    ),
    (
        (3, 3, 0.8, 2.0, "never", 3),
        [
            *([29, 27, 26, 24, 58, 35], [26, 24, 20, 12, 2, 26], [23, 56, 34, 37, 43, 11]),
            *([44, 51, 24, 58, 35, 36], [6, 34, 37, 2, 26, 21], [47, 16, 45, 50, 25]),
        ],
        [-0.4139, -0.4177, -0.4201, -0.4173, -0.4176, -0.4367],
    ),
    (
        (4, 2, 5.0, -1.0, False, 2),
        [[29, 30, 32, 33, 35, 36], [29, 30, 32, 33, 35, 39], [9], [6, 34]],
        [-85.9839, -86.0743, -10.0744, -22.2839],
    ),
]


@pytest.mark.parametrize(("options", "sequences", "scores"), WRITTEN)
def test_what_transformers_4_gave(options: Any, sequences: Any, scores: list[float]) -> None:
    num_beams, groups, penalty, length_penalty, stop, count = options
    found = beam_search(
        Wrapped(written_model()),
        [[6, 12, 27], [41, 9, 17]],
        num_beams=num_beams,
        max_new_tokens=6,
        length_penalty=length_penalty,
        early_stopping=stop,
        num_beam_groups=groups,
        diversity_penalty=penalty,
        num_return_sequences=count,
        eos_token_id=ENDS,
        pad_token_id=PAD,
    )
    flat = [row for rows in found.sequences for row in rows]
    assert [row[:-1] if row[-1] in ENDS else row for row in flat] == sequences
    assert list(itertools.chain(*found.scores)) == pytest.approx(scores, abs=1e-4)


def slow_twin(
    log_probs: Callable[[list[int]], list[float]],
    *,
    size: int,
    num_groups: int,
    steps: int,
    diversity_penalty: float,
    length_penalty: float,
    early_stopping: Any,
) -> tuple[list[list[int]], list[float]]:
    """One prompt, one candidate at a time; `log_probs(new ids)` gives all tokens."""
    open_: list[list[tuple[float, list[int]]]] = [[(0.0, [])] for _ in range(num_groups)]
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in range(num_groups)]
    done = [False] * num_groups
    for n in range(1, steps + 1):
        counts: Counter[int] = Counter()
        for g in range(num_groups):
            if done[g]:
                counts[PAD] += size
                continue
            candidates = []
            for total, row in open_[g]:
                for token, log_p in enumerate(log_probs(row)):
                    score = total + log_p - diversity_penalty * counts[token]
                    candidates.append((score, [*row, token]))
            candidates.sort(key=lambda c: -c[0])
            for place, (total, row) in enumerate(candidates):
                if row[-1] in ENDS and place < size:
                    ended[g] = keep_best([*ended[g], (total / n**length_penalty, row)], size)
            open_[g] = [c for c in candidates if c[1][-1] not in ENDS][:size]
            counts.update(row[-1] for _, row in open_[g])
            at = steps if early_stopping == "never" and length_penalty > 0 else n
            done[g] = len(ended[g]) == size and (
                early_stopping is True
                or min(s for s, _ in ended[g]) >= candidates[0][0] / at**length_penalty
            )
    for g in range(num_groups):
        if not done[g]:
            cut = [(total / steps**length_penalty, row) for total, row in open_[g]]
            ended[g] = keep_best(ended[g] + cut, size)
    best = keep_best(list(itertools.chain(*ended)), size * num_groups)
    return [row for _, row in best], [score for score, _ in best]


def keep_best(scored: list[tuple[float, list[int]]], count: int) -> list[tuple[float, list[int]]]:
    return sorted(scored, key=lambda item: -item[0])[:count]


class Repetition:
    """Transformers' repetition penalty, as a processor."""

    def __init__(self) -> None:
        self.penalty = transformers.RepetitionPenaltyLogitsProcessor(1.3)

    def process(self, scores: Tensor, *, context: Tensor, **_: Any) -> Tensor:
        result: Tensor = self.penalty(context, scores)
        return result


@pytest.mark.parametrize(("size", "num_groups"), [(1, 3), (2, 2), (3, 2), (2, 3)])
def test_the_slow_twin_agrees(size: int, num_groups: int) -> None:
    model = random_model("gpt2", seed=size)
    prompt = [[9, 17], [33, 2]]
    stops: list[Any] = [False, True, "never"]
    settings = itertools.product([0.3, 2.0], [-1.0, 0.0, 1.0, 2.0], stops)
    known: dict[tuple[int, ...], list[float]] = {}

    def log_probs(ids: list[int]) -> list[float]:
        if tuple(ids) not in known:
            with torch.no_grad():
                known[tuple(ids)] = (
                    model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).tolist()
                )
        return known[tuple(ids)]

    for penalty, length_penalty, stop in settings:
        found = beam_search(
            Wrapped(model),
            prompt,
            num_beams=size * num_groups,
            max_new_tokens=6,
            length_penalty=length_penalty,
            early_stopping=stop,
            num_beam_groups=num_groups,
            diversity_penalty=penalty,
            num_return_sequences=size * num_groups,
            eos_token_id=ENDS,
            pad_token_id=PAD,
        )
        for place, start in enumerate(prompt):
            sequences, scores = slow_twin(
                lambda row, start=start: log_probs(start + row),  # type: ignore[misc]
                size=size,
                num_groups=num_groups,
                steps=6,
                diversity_penalty=penalty,
                length_penalty=length_penalty,
                early_stopping=stop,
            )
            # Two groups may find the same sequence; the order of equal scores is open.
            assert found.scores[place] == pytest.approx(scores, rel=1e-6)
            assert sorted(found.sequences[place]) == sorted(sequences)


class Nothing:
    def process(self, scores: Tensor, **_: Any) -> Tensor:
        return scores


GROUPS: dict[str, Any] = {"num_beam_groups": 3, "diversity_penalty": 0.7}


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "tensor"])
def test_with_and_without_a_processor(lazy: bool) -> None:
    model = Wrapped(random_model("llama"), lazy=lazy)
    options: dict[str, Any] = {
        "num_beams": 6,
        "max_new_tokens": 8,
        "num_return_sequences": 6,
        "eos_token_id": ENDS,
    }
    without = beam_search(model, [[9, 17], [33, 2, 8]], **options, **GROUPS)
    same = beam_search(model, [[9, 17], [33, 2, 8]], processor=Nothing(), **options, **GROUPS)
    assert same.sequences == without.sequences
    assert same.scores[1] == pytest.approx(without.scores[1])
    other = beam_search(model, [[9, 17], [33, 2, 8]], processor=Repetition(), **options, **GROUPS)
    assert other.sequences != without.sequences


def test_a_large_penalty_keeps_the_groups_apart() -> None:
    found = beam_search(
        Wrapped(random_model("llama")),
        [[9, 17]],
        num_beams=4,
        max_new_tokens=5,
        num_beam_groups=4,
        diversity_penalty=1000.0,
        num_return_sequences=4,
    )
    for step in range(5):
        assert len({row[step] for row in found.sequences[0]}) == 4


def test_the_first_group_is_a_beam_search_of_its_own() -> None:
    model = Wrapped(random_model("gpt2"))
    options: dict[str, Any] = {"max_new_tokens": 6, "length_penalty": 0.0}
    alone = beam_search(model, [[9, 17]], num_beams=2, num_return_sequences=2, **options)
    found = beam_search(
        model,
        [[9, 17]],
        num_beams=4,
        num_return_sequences=4,
        num_beam_groups=2,
        diversity_penalty=3.0,
        **options,
    )
    for sequence, score in zip(alone.sequences[0], alone.scores[0], strict=True):
        assert sequence in found.sequences[0]
        assert found.scores[0][found.sequences[0].index(sequence)] == pytest.approx(score)
