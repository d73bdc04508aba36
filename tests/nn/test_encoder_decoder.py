"""Reading one text and writing another: the cache, padding on both sides, beam search, errors."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor

from lmhead import LazyLogits
from lmhead.nn import DecoderBody, EncoderDecoder, EncoderDecoderConfig
from lmhead.sampling import beam_search

# The logits are small, and compared whole.
pytestmark = pytest.mark.filterwarnings("ignore:materialize")

VOCAB = 23
KINDS: dict[str, dict[str, Any]] = {
    "2017": {"position": "sinusoidal", "norm_first": False, "activation": "relu", "bias": True},
    "learned": {"position": "learned", "activation": "gelu"},
    "modern": {
        "position": "rotary",
        "norm": "rms",
        "activation": "swiglu",
        "num_key_value_heads": 2,
    },
}


def model(**changes: Any) -> EncoderDecoder:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "max_length": 12,
    }
    made = EncoderDecoder(EncoderDecoderConfig(**(sizes | changes))).double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.4)
    return made.requires_grad_(False)


@pytest.fixture(params=KINDS)
def any_model(request: pytest.FixtureRequest) -> EncoderDecoder:
    return model(**KINDS[request.param])


def texts() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    source, target = torch.randint(VOCAB, (3, 6)), torch.randint(VOCAB, (3, 7))
    return source, target, torch.arange(6) < torch.tensor([[6], [2], [5]])


def test_a_padded_source_is_the_source_alone(any_model: EncoderDecoder) -> None:
    source, target, mask = texts()
    logits = any_model(source, target, mask)
    assert isinstance(logits, LazyLogits)
    together = logits.materialize()
    for row in range(3):
        alone = any_model(source[row : row + 1, mask[row]], target[row : row + 1])
        assert_close(together[row], alone.materialize()[0], atol=1e-10)
    others = torch.where(mask, source, (source + 5) % VOCAB)
    assert_close(any_model(others, target, mask).materialize(), together)


def test_padding_on_the_left_of_a_source_is_as_good(any_model: EncoderDecoder) -> None:
    source, target, mask = texts()
    left, left_mask = source.flip(1), mask.flip(1)
    for row, length in enumerate(mask.sum(-1).tolist()):
        left[row, 6 - length :] = source[row, :length]
    expected = any_model(source, target, mask).materialize()
    assert_close(any_model(left, target, left_mask).materialize(), expected, atol=1e-10)


def test_every_token_attends_to_the_whole_source(any_model: EncoderDecoder) -> None:
    source, target, _ = texts()
    before = any_model(source, target).materialize()
    for place in range(6):
        other = source.clone()
        other[:, place] = (other[:, place] + 1) % VOCAB
        change = any_model(other, target).materialize() - before
        assert bool((change.abs().amax(-1) > 1e-6).all())


def test_no_token_sees_the_future(any_model: EncoderDecoder) -> None:
    source, target, mask = texts()
    other = target.clone()
    other[:, 4:] = (target[:, 4:] + 1) % VOCAB
    before, after = (any_model(source, t, mask).materialize() for t in (target, other))
    assert_close(after[:, :4], before[:, :4], atol=1e-12)
    assert bool((after[:, 4:] - before[:, 4:]).abs().amax(-1).gt(1e-6).all())


@pytest.mark.parametrize("cuts", [(1, 2, 3, 4, 5, 6), (3,), (2, 6)])
def test_writing_in_pieces_is_writing_at_once(
    any_model: EncoderDecoder, cuts: tuple[int, ...]
) -> None:
    source, target, mask = texts()
    memory: Tensor | None = any_model.encode(source, mask)
    whole, _ = any_model.decode(target, memory, mask)
    cache, pieces = None, []
    for begin, end in zip((0, *cuts), (*cuts, 7), strict=True):
        hidden, cache = any_model.decode(target[:, begin:end], memory, mask, cache)
        pieces.append(hidden)
        memory = None  # the cache holds it from now on
    assert_close(torch.cat(pieces, 1), whole, atol=1e-11)


def test_selected_rows_keep_their_own_sources(any_model: EncoderDecoder) -> None:
    source, target, mask = texts()
    whole, _ = any_model.decode(target, any_model.encode(source, mask), mask)
    _, cache = any_model.decode(target[:, :4], any_model.encode(source, mask), mask)
    rows = torch.tensor([2, 0, 2, 1])
    hidden, _ = any_model.decode(target[rows, 4:], None, None, cache.select(rows))
    assert_close(hidden, whole[rows, 4:], atol=1e-11)


def test_beam_search_finds_the_best_of_all_translations() -> None:
    """As many beams as there are prefixes: no translation is missed."""
    small = model(vocab_size=4, **KINDS["2017"])
    torch.manual_seed(3)
    source = torch.randint(4, (2, 5))
    mask = torch.arange(5) < torch.tensor([[5], [2]])
    end, begin, longest = 0, 1, 3
    writer = small.given(source, mask, eos_token_ids=(end,))
    found = beam_search(writer, [[begin]] * 2, num_beams=64, max_new_tokens=longest)
    for row in range(2):
        scores = {}
        for tokens in itertools.product(range(4), repeat=longest):
            text = list(tokens[: tokens.index(end) + 1] if end in tokens else tokens)
            target = torch.tensor([[begin, *text[:-1]]])
            log_probs = (
                small(source[row : row + 1, mask[row]], target).materialize().log_softmax(-1)
            )
            total = sum(float(log_probs[0, t, token]) for t, token in enumerate(text))
            scores[tuple(text)] = total / len(text)
        best = max(scores, key=lambda text: scores[text])
        assert tuple(found.best[row]) == best
        assert found.scores[row][0] == pytest.approx(scores[best])


def test_one_embedding_serves_all_three() -> None:
    tied: Any = model()
    assert tied.encoder.embedding is tied.decoder.embedding
    assert tied.head.weight is tied.embedding.weight
    names = [name for name, _ in tied.named_parameters()]
    assert [name for name in names if "embedding" in name] == ["embedding.weight"]
    own: Any = model(tied=False)
    assert own.head.weight is not own.embedding.weight


def test_numeric_gradients() -> None:
    source, target, mask = texts()
    small = model(**KINDS["modern"]).requires_grad_(True)
    weight: Any = dict(small.named_parameters())["decoder.blocks.1.cross.key.weight"]

    def loss() -> Tensor:
        logits = small(source, target[:, :-1], mask)
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())

    (grad,) = torch.autograd.grad(loss(), weight)
    eps = 1e-6
    for place in ((0, 0), (3, 5), (7, 15)):
        with torch.no_grad():
            weight[place] += eps
            high = float(loss())
            weight[place] -= 2 * eps
            low = float(loss())
            weight[place] += eps
        assert float(grad[place]) == pytest.approx((high - low) / (2 * eps), rel=1e-4, abs=1e-9)


def test_learning_to_copy() -> None:
    """A few steps on a task that needs cross-attention: say the source again."""
    torch.manual_seed(0)
    config = EncoderDecoderConfig(
        vocab_size=8, hidden_size=32, num_attention_heads=4, encoder_layers=1, decoder_layers=1
    )
    small = EncoderDecoder(config)
    optimizer = torch.optim.AdamW(small.parameters(), lr=1e-2)
    for _ in range(150):
        source = torch.randint(2, 8, (32, 4))
        target = F.pad(source, (1, 0), value=1)
        loss = F.cross_entropy(small(source, target[:, :-1]).flatten(0, 1), source.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    source = torch.tensor([[2, 7, 3, 5], [6, 6, 2, 4]])
    found = beam_search(small.eval().given(source), [[1], [1]], num_beams=3, max_new_tokens=4)
    assert found.best == source.tolist()


def test_arguments_that_do_not_fit() -> None:
    both = model()
    source, target, mask = texts()
    memory = both.encode(source, mask)
    with pytest.raises(ValueError, match="memory must be given"):
        both.decode(target, None)
    with pytest.raises(ValueError, match=r"memory must have shape \(3, U, 16\); got \(2, 6, 16\)"):
        both.decode(target, memory[:2])
    with pytest.raises(ValueError, match=r"memory_mask must be bool and of shape \(3, 6\)"):
        both.decode(target, memory, mask[:, :5])
    with pytest.raises(ValueError, match="mask must leave a token in every row; row 1 has none"):
        both.encode(source, torch.tensor([[True], [False], [True]]).expand(3, 6))
    with pytest.raises(ValueError, match="encoder_layers must be at least 1; got 0"):
        model(encoder_layers=0)
    deaf = DecoderBody(both.config.decoder()).double()
    with pytest.raises(ValueError, match="memory must be None"):
        deaf(target, memory=memory)
