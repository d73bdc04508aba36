"""Beam search gives what transformers gives: token for token, score for score."""

import itertools
import math
from typing import Any

import pytest
import torch
from compare import assert_close
from guard import no_tensor_of
from hf_wrap import FAMILIES, Wrapped, random_model, transformers
from torch import Tensor

from lmhead import LMHead
from lmhead.sampling.beam import Beams, beam_search

PROMPT = torch.tensor([[5, 6, 7, 8], [41, 9, 17, 33], [12, 50, 3, 29]])
UNEVEN = [[5, 6, 7, 8, 11], [41, 9], [12, 50, 3]]
SEVERAL_ENDS = [3, 7, 10, 22, 40]
PENALTIES = [-1.0, 0.0, 0.5, 1.0, 2.0]
STOPS: list[Any] = [False, True, "never"]


def theirs(model: Any, prompt: Any, *, num_beams: int, **options: Any) -> Beams:
    """What transformers' `generate` finds, in our form."""
    length = max(map(len, prompt))
    ids = torch.tensor([[0] * (length - len(row)) + list(row) for row in prompt])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in prompt])
    out = model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        num_beams=num_beams,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    new = out.sequences[:, length:].tolist()
    if num_beams > 1:
        lengths = (out.beam_indices >= 0).sum(1).tolist()
        scores = out.sequences_scores.tolist()
    else:
        ends = set(options.get("eos_token_id") or [])
        lengths = [
            next((n for n, token in enumerate(row, 1) if token in ends), len(row)) for row in new
        ]
        steps = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        penalty = options.get("length_penalty", 1.0)
        sums = [float(row[:n].sum()) for row, n in zip(steps, lengths, strict=True)]
        scores = [s / n**penalty for s, n in zip(sums, lengths, strict=True)]
    sequences = [row[:n] for row, n in zip(new, lengths, strict=True)]
    count = options.get("num_return_sequences", 1)
    parts = range(0, len(sequences), count)
    return Beams(
        [sequences[i : i + count] for i in parts], [scores[i : i + count] for i in parts], 0
    )


def assert_same(ours: Beams, other: Beams, what: object) -> None:
    assert ours.sequences == other.sequences, what
    assert_close(
        torch.tensor(ours.scores), torch.tensor(other.scores), rtol=1e-5, atol=1e-5, what=str(what)
    )


@pytest.mark.parametrize("num_beams", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_length_penalty_and_early_stopping(family: str, num_beams: int) -> None:
    model = random_model(family, seed=num_beams)
    ended = cut = 0
    for penalty, stop in itertools.product(PENALTIES, STOPS if num_beams > 1 else STOPS[:1]):
        options: dict[str, Any] = {
            "num_beams": num_beams,
            "max_new_tokens": 10,
            "length_penalty": penalty,
            "early_stopping": stop,
            "num_return_sequences": num_beams,
            "eos_token_id": SEVERAL_ENDS,
        }
        ours = beam_search(Wrapped(model), PROMPT, **options)
        assert_same(ours, theirs(model, PROMPT.tolist(), **options), (penalty, stop))
        last = [sequence[-1] in SEVERAL_ENDS for found in ours.sequences for sequence in found]
        ended, cut = ended + sum(last), cut + len(last) - sum(last)
    assert ended
    assert cut or num_beams == 1


@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "tensor"])
@pytest.mark.parametrize("eos", [[], [7], SEVERAL_ENDS], ids=["none", "one", "several"])
@pytest.mark.parametrize("prompt", [PROMPT.tolist(), UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_different_lengths_and_ends(
    family: str, prompt: list[list[int]], eos: list[int], lazy: bool
) -> None:
    for seed, count in ((0, 1), (1, 3), (2, 2)):
        model = random_model(family, seed)
        options: dict[str, Any] = {
            "num_beams": 3,
            "max_new_tokens": 12,
            "num_return_sequences": count,
        }
        ours = beam_search(Wrapped(model, eos=tuple(eos), lazy=lazy), prompt, **options)
        assert_same(ours, theirs(model, prompt, eos_token_id=eos or None, **options), seed)


class HuggingFaceProcessor:
    def __init__(self, *processors: Any) -> None:
        self.processors = transformers.LogitsProcessorList(processors)

    def process(
        self, scores: Tensor, *, context: Tensor, prompt_length: Tensor, context_mask: Tensor
    ) -> Tensor:
        assert context.shape == context_mask.shape
        assert (prompt_length <= context_mask.sum(-1)).all()
        result: Tensor = self.processors(context, scores)
        return result


@pytest.mark.parametrize("num_beams", [1, 2, 4])
@pytest.mark.parametrize("prompt", [PROMPT.tolist(), UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("lazy", [True, False], ids=["lazy", "tensor"])
def test_processors(num_beams: int, prompt: list[list[int]], lazy: bool) -> None:
    bad = [[14], [10, 0], [27, 22]]
    makers: list[tuple[dict[str, Any], list[Any]]] = [
        (
            {"repetition_penalty": 1.4},
            [transformers.RepetitionPenaltyLogitsProcessor(1.4)],
        ),
        (
            {"no_repeat_ngram_size": 2},
            [transformers.NoRepeatNGramLogitsProcessor(2)],
        ),
        (
            {"bad_words_ids": bad, "repetition_penalty": 0.8, "renormalize_logits": True},
            [
                transformers.RepetitionPenaltyLogitsProcessor(0.8),
                transformers.NoBadWordsLogitsProcessor(bad, SEVERAL_ENDS),
                transformers.LogitNormalization(),
            ],
        ),
    ]
    for family, (settings, processors) in itertools.product(FAMILIES, makers):
        model = random_model(family)
        options: dict[str, Any] = {
            "num_beams": num_beams,
            "max_new_tokens": 9,
            "num_return_sequences": num_beams,
            "eos_token_id": SEVERAL_ENDS,
        }
        expected = theirs(model, prompt, **options, **settings)
        ours = beam_search(
            Wrapped(model, lazy=lazy),
            prompt,
            pad_token_id=0,
            processor=HuggingFaceProcessor(*processors),
            **options,
        )
        assert_same(ours, expected, (family, settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_of_head(dtype: torch.dtype) -> None:
    model = random_model("llama").to(dtype)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 4, "eos_token_id": SEVERAL_ENDS}
    plain = beam_search(Wrapped(model, lazy=False), PROMPT, **options)
    lazy = beam_search(Wrapped(model), PROMPT, **options)
    # A bfloat16 product is rounded to bfloat16 by torch, and not by us.
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    assert_close(torch.tensor(lazy.scores), torch.tensor(plain.scores), rtol=tolerance)
    if dtype == torch.float32:
        assert lazy.sequences == plain.sequences


def test_a_prompt_does_not_depend_on_its_neighbours() -> None:
    model = random_model("gpt2")
    options: dict[str, Any] = {
        "num_beams": 4,
        "max_new_tokens": 10,
        "num_return_sequences": 4,
        "eos_token_id": SEVERAL_ENDS,
    }
    together = beam_search(Wrapped(model), UNEVEN, **options)
    for place, row in enumerate(UNEVEN):
        alone = beam_search(Wrapped(model), [row], **options)
        other = Beams([together.sequences[place]], [together.scores[place]], 0)
        assert_same(alone, other, place)


def test_padding_in_a_tensor_is_marked_by_its_id() -> None:
    model = random_model("llama")
    padded = torch.tensor([[5, 6, 7, 8, 11], [59, 59, 59, 41, 9], [59, 59, 12, 50, 3]])
    options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 6}
    expected = beam_search(Wrapped(model), UNEVEN, **options)
    assert_same(beam_search(Wrapped(model), padded, pad_token_id=59, **options), expected, "59")
    unmarked = beam_search(Wrapped(model), padded, **options)
    assert unmarked.scores[0] == pytest.approx(expected.scores[0])
    assert unmarked.scores[1] != pytest.approx(expected.scores[1])


def test_prompts_that_are_done_leave_the_batch() -> None:
    model = Wrapped(random_model("llama"))
    found = beam_search(
        model, PROMPT, num_beams=3, max_new_tokens=30, early_stopping=True, eos_token_id=[*range(9)]
    )
    assert len(model.rows) == found.steps < 30
    assert model.rows[:2] == [3, 9]
    assert model.rows == [3, *sorted(model.rows[1:], reverse=True)]
    assert model.rows[-1] < 9


class Chain:
    """A model whose next word depends on the last one only: logits[last word]."""

    tokenizer = None

    def __init__(self, logits: Tensor, eos: tuple[int, ...] = ()) -> None:
        self.logits, self.eos_token_ids = logits, eos

    def body(self, ids: Tensor, cache: Any, mask: Tensor) -> tuple[Tensor, Any]:  # noqa: ARG002
        return ids[..., None].double(), self

    def head(self, hidden: Tensor) -> Tensor:
        return self.logits[hidden[..., 0].long()]

    def select(self, rows: Tensor) -> Any:  # noqa: ARG002
        return self

    def everything(self, steps: int, penalty: float) -> list[tuple[float, list[int]]]:
        """All sequences that end or have `steps` words, best first."""
        log_p = self.logits.double().log_softmax(-1).tolist()
        open_, ended = [(0.0, [0])], []
        for _ in range(steps):
            grown = [
                (total + log_p[row[-1]][word], [*row, word])
                for total, row in open_
                for word in range(len(log_p))
            ]
            ended += [(t, row) for t, row in grown if row[-1] in self.eos_token_ids]
            open_ = [(t, row) for t, row in grown if row[-1] not in self.eos_token_ids]
        scored = [(t / (len(row) - 1) ** penalty, row[1:]) for t, row in ended + open_]
        return sorted(scored, key=lambda item: -item[0])


@pytest.mark.parametrize("penalty", PENALTIES)
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


class LazyChain(Chain):
    """Words of equal logits, from our head."""

    def __init__(self, vocab: int) -> None:
        super().__init__(torch.zeros(1))
        self.module = LMHead(4, vocab)
        torch.nn.init.zeros_(self.module.weight)

    def head(self, hidden: Tensor) -> Any:
        return self.module(hidden.float().expand(*hidden.shape[:-1], 4))


def test_no_logits_are_built() -> None:
    vocab, beams = 50_000, 4
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
        ({"num_beams": 2.0}, TypeError, "num_beams must be a whole number; got float"),
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
        ({"eos_token_id": [1.5]}, TypeError, "eos_token_id must be a whole number"),
        ({"pad_token_id": -1}, ValueError, "pad_token_id must be at least 0"),
        ({"processor": 3}, TypeError, "processor must have a method process; got int"),
        ({"prompt": [1, 2]}, TypeError, "prompt must be a tensor"),
        ({"prompt": []}, TypeError, "prompt must be a tensor"),
        ({"prompt": [[1], []]}, ValueError, "prompt must hold no empty list; got one at index 1"),
        ({"prompt": [[0.5]]}, TypeError, "prompt must be whole numbers"),
        ({"prompt": torch.zeros(2, 2)}, TypeError, "prompt must be whole numbers"),
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
