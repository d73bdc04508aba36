"""Beam search where transformers is no guide: truth by enumeration, ties, dead ends, errors."""

import math
from typing import Any

import pytest
import torch
from markov_models import Chain, LazyChain
from torch import Tensor
from torch_watch import no_tensor_of

from lmhead.sampling.beam import beam_search


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("eos", [(), (4,), (1, 4)])
def test_enough_beams_find_the_best_of_all_sequences(eos: tuple[int, ...], penalty: float) -> None:
    torch.manual_seed(3)
    chain = Chain(2 * torch.randn(5, 5), eos)
    everything = chain.everything(3, penalty)
    found = beam_search(
        chain,
        [[0]],
        num_beams=125,
        max_new_tokens=3,
        length_penalty=penalty,
        early_stopping="never",
        num_return_sequences=125,
    )
    expected = {tuple(row): score for score, row in everything}
    assert {tuple(row) for row in found.sequences[0]} == set(expected)  # all there are, no more
    assert found.scores[0] == pytest.approx([expected[tuple(row)] for row in found.sequences[0]])
    assert found.scores[0] == sorted(found.scores[0], reverse=True)


def test_ties_go_to_the_first_beam_and_the_lowest_id() -> None:
    for chain in (Chain(torch.zeros(9, 9)), LazyChain(9)):
        found = beam_search(chain, [[5]], num_beams=3, max_new_tokens=2, num_return_sequences=3)
        assert found.sequences == [[[0, 0], [0, 1], [0, 2]]]
        assert found.scores[0] == pytest.approx([-math.log(9)] * 3)


def test_no_logits_are_built() -> None:
    vocab, beams = 80_000, 4
    model = LazyChain(vocab)
    torch.nn.init.normal_(model.module.weight)
    with no_tensor_of(2 * beams, vocab):
        beam_search(model, [[1], [2]], num_beams=beams, max_new_tokens=3)


class Cut:
    """A processor that leaves `words` at step `step`, and everything before and after."""

    def __init__(self, words: list[int], step: int = 0) -> None:
        self.words, self.step = words, step

    def process(
        self, scores: Tensor, *, context: Tensor, prompt_length: Tensor, context_mask: Tensor
    ) -> Tensor:
        assert context_mask.all()
        if context.shape[1] - int(prompt_length[0]) != self.step:
            return scores
        kept = torch.full_like(scores, -math.inf)
        kept[:, self.words] = scores[:, self.words]
        return kept


@pytest.mark.parametrize("num_beams", [1, 3])
def test_fewer_sequences_where_fewer_exist(num_beams: int) -> None:
    chain = Chain(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)), eos=(4,))
    options: dict[str, Any] = {"num_beams": num_beams, "num_return_sequences": num_beams}
    only_end = beam_search(chain, [[0]], max_new_tokens=5, processor=Cut([4]), **options)
    assert only_end.sequences == [[[4]]]
    assert only_end.steps == 1
    one_way = beam_search(chain, [[0]], max_new_tokens=1, processor=Cut([2]), **options)
    assert one_way.sequences == [[[2]]]
    with pytest.raises(ValueError, match=r"processor must leave a sequence to return; .* prompt 0"):
        beam_search(chain, [[0]], max_new_tokens=5, processor=Cut([]), **options)


def test_a_narrow_start_widens_again() -> None:
    chain = Chain(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))
    found = beam_search(
        chain, [[0]], num_beams=4, max_new_tokens=3, num_return_sequences=4, processor=Cut([2])
    )
    assert len({tuple(row) for row in found.sequences[0]}) == 4
    assert all(row[0] == 2 for row in found.sequences[0])
    assert all(map(math.isfinite, found.scores[0]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("processor", [None, Cut([1, 2])])
def test_a_head_without_a_distribution_is_an_error(value: float, processor: Any) -> None:
    logits = torch.full((4, 4), value)
    with pytest.raises(ValueError, match=r"model\.head must give logits that are finite or -inf"):
        beam_search(Chain(logits), [[0]], num_beams=2, max_new_tokens=2, processor=processor)


class Broken:
    def __init__(self, result: Any) -> None:
        self.result = result

    def process(self, scores: Tensor, **_: Any) -> Any:
        return self.result if self.result is None else scores * self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, r"must give scores of shape \(1, 4\)"),
        (torch.ones(3, 1, 1), r"must give scores of shape \(1, 4\); got \(3, 1, 4\)"),
        (math.nan, "finite or -inf"),
    ],
)
def test_a_broken_processor_is_an_error(result: Any, message: str) -> None:
    options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 2}
    with pytest.raises(ValueError, match=message):
        beam_search(Chain(torch.zeros(4, 4)), [[0]], processor=Broken(result), **options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_beams": 0}, ValueError, "num_beams must be at least 1; got 0"),
        ({"num_beams": 2.0}, TypeError, "num_beams must be an integer; got float"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1; got 0"),
        ({"length_penalty": math.nan}, ValueError, "length_penalty must be finite; got nan"),
        ({"early_stopping": "always"}, ValueError, "early_stopping must be False, True or 'never'"),
        ({"early_stopping": 1}, ValueError, "early_stopping must be False, True or 'never'; got 1"),
        ({"num_return_sequences": 5}, ValueError, r"num_return_sequences must be in \[1, 4\]"),
        (
            {"num_beam_groups": 3, "diversity_penalty": 1.0},
            ValueError,
            "num_beam_groups must divide num_beams; got 3 groups of 4",
        ),
        ({"num_beam_groups": 2}, ValueError, "diversity_penalty must be above 0"),
        ({"diversity_penalty": 1.0}, ValueError, "diversity_penalty must be 0, with num_beam_gro"),
        ({"diversity_penalty": -1.0}, ValueError, "diversity_penalty must be at least 0"),
        ({"eos_token_id": -1}, ValueError, "eos_token_id must be at least 0; got -1"),
        ({"eos_token_id": [1.5]}, TypeError, "eos_token_id must be an integer"),
        ({"pad_token_id": -1}, ValueError, "pad_token_id must be at least 0"),
        ({"processor": 3}, TypeError, "processor must have a method process; got int"),
        ({"prompt": [1, 2]}, TypeError, "prompt must be a tensor"),
        ({"prompt": []}, TypeError, "prompt must be a tensor"),
        ({"prompt": [[1], []]}, ValueError, "prompt must hold no empty list; got one at index 1"),
        ({"prompt": [[0.5]]}, TypeError, "prompt must be integers"),
        ({"prompt": torch.zeros(2, 2)}, TypeError, "prompt must be integers"),
        ({"prompt": torch.tensor([1])}, ValueError, r"prompt must have shape \(B, L\)"),
        (
            {"prompt": torch.tensor([[1, 2], [2, 2]]), "pad_token_id": 2},
            ValueError,
            "prompt must hold an id that is not padding; row 1 has none",
        ),
    ],
)
def test_errors_name_the_argument(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    options: dict[str, Any] = {"prompt": [[0]], "num_beams": 4, "max_new_tokens": 2}
    options |= change
    with pytest.raises(error, match=message):
        beam_search(Chain(torch.zeros(9, 9)), options.pop("prompt"), **options)
