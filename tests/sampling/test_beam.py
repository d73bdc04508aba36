"""Beam search gives what transformers gives: token for token, score for score."""

import itertools
from typing import Any

import pytest
import torch
from compare import assert_close
from huggingface_models import FAMILIES, Wrapped, random_model, transformers
from torch import Tensor

from lmhead.sampling.beam import Beams, beam_search, stream_beam_search

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


def test_the_steps_of_a_search_end_with_its_result() -> None:
    model = random_model("llama")
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 6, "eos_token_id": SEVERAL_ENDS}
    steps = list(stream_beam_search(Wrapped(model), UNEVEN, **options))
    assert steps[-1] == beam_search(Wrapped(model), UNEVEN, **options)
    assert [step.steps for step in steps] == list(range(1, len(steps) + 1))
    for number, step in enumerate(steps, 1):
        assert all(len(found) == 1 <= len(found[0]) <= number for found in step.sequences)
        assert all(score < 0 for scores in step.scores for score in scores)
