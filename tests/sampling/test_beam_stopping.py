"""When a group of beams stops: single steps, with candidates written by hand."""

from typing import Any

import pytest

from lmhead.sampling.beam_groups import Candidate, Group, Rules

END, GO = 9, 2


def group(*steps: list[tuple[float, int]], **changes: Any) -> Group:
    """A group of two beams after steps of (total, token), all from its first beam."""
    options: dict[str, Any] = {
        "size": 2,
        "eos": frozenset([END]),
        "max_new_tokens": 10,
        "length_penalty": 1.0,
        "early_stopping": False,
        "diverse": False,
    }
    made = Group(Rules(**(options | changes)))
    for step in steps:
        made.advance([Candidate(total, 0, token) for total, token in step])
    return made


@pytest.mark.parametrize("stop", [False, True, "never"])
def test_it_goes_on_until_enough_sequences_have_ended(stop: Any) -> None:
    made = group([(-1.0, END), (-5.0, GO), (-6.0, 3)], early_stopping=stop)
    assert not made.done
    assert [h.tokens for h in made.ended] == [[END]]
    assert made.totals == [-5.0, -6.0]


# Two have ended, the worse with a score of -3; the best beam has -3.5 after one token. At once: it
# would not win. After ten tokens with no further loss: -0.35, it would.
@pytest.mark.parametrize(
    ("stop", "length_penalty", "done"),
    [(True, 1.0, True), (False, 1.0, True), ("never", 1.0, False), ("never", 0.0, True)],
)
def test_the_three_meanings_of_early_stopping(stop: Any, length_penalty: float, done: bool) -> None:
    step = [(-1.0, END), (-3.0, END), (-3.5, GO), (-4.0, 3)]
    assert group(step, early_stopping=stop, length_penalty=length_penalty).done is done


@pytest.mark.parametrize(("stop", "done"), [(True, True), (False, False), ("never", False)])
def test_a_beam_that_would_win_now_is_followed(stop: Any, done: bool) -> None:
    steps = [(-1.0, GO), (-4.0, END), (-5.0, 3)], [(-1.5, GO), (-6.0, END), (-7.0, 3)]
    made = group(*steps, early_stopping=stop, length_penalty=0.0)
    assert [h.score for h in made.ended] == [-4.0, -6.0]
    assert made.done is done


def test_short_is_best_where_length_costs() -> None:
    # -1.05 is worth -2.1 now, which beats -2.2, and only less later.
    steps = [(-1.0, GO), (-2.0, END), (-5.0, 3)], [(-1.05, GO), (-1.1, END), (-6.0, 3)]
    made = group(*steps, early_stopping="never", length_penalty=-1.0)
    assert [h.score for h in made.ended] == pytest.approx([-2.0, -2.2])
    assert not made.done


def test_a_diverse_group_measures_the_future_by_the_best_candidate() -> None:
    # Transformers 4 asks the best of all candidates, -1, although it has ended.
    step = [(-1.0, END), (-3.0, END), (-3.5, GO), (-4.0, 3)]
    assert group(step).done
    assert not group(step, diverse=True).done


def test_a_diverse_group_that_is_done_at_the_end_takes_no_more() -> None:
    steps = [(-1.0, GO), (-4.0, END), (-5.0, 3)], [(-1.5, GO), (-6.0, END), (-7.0, 3)]
    options: dict[str, Any] = {"max_new_tokens": 2, "early_stopping": True, "length_penalty": 0.0}
    assert [h.score for h in group(*steps, **options).ended] == [-1.5, -4.0]
    assert [h.score for h in group(*steps, diverse=True, **options).ended] == [-4.0, -6.0]


@pytest.mark.parametrize("diverse", [False, True])
def test_no_way_on_is_the_end(diverse: bool) -> None:
    made = group([(-1.0, END), (float("-inf"), GO)], diverse=diverse)
    assert made.done
    assert [h.tokens for h in made.ended] == [[END]]
