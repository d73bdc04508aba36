"""2,000 damaged model files: `make fuzz` opens 100,000."""

from itertools import count, islice

import pytest

from fuzz.corpus import SAMPLES
from fuzz.run import failures, run_cases, summary
from fuzz.worker import choose

pytest.importorskip("gguf")


def _seeds(first: int, number: int, *, slow: bool) -> list[int]:
    return list(islice((s for s in count(first) if SAMPLES[choose(s)[0]].slow is slow), number))


@pytest.mark.parametrize("part", range(2))
def test_damaged_files_open_or_are_refused(part: int) -> None:
    firsts = (20_000 * part, 20_000 * part + 10_000)
    seeds = [seed for first in firsts for seed in _seeds(first, 490, slow=False)]
    results = list(run_cases(seeds, workers=1, slow=False))
    assert not failures(results), summary(results)
    outcomes = {result["outcome"] for result in results}
    assert outcomes == {"opened", "refused"}  # else the damage is too little or too much
    assert len(results) == 980


def test_damaged_files_that_transformers_opens() -> None:
    pytest.importorskip("transformers")
    results = list(run_cases(_seeds(0, 40, slow=True), workers=1))
    assert not failures(results), summary(results)
