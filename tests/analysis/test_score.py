"""`score`: the figures are those of dense logits, window by window; memory does not grow."""

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_models import tiny, write_model

from lmhead.analysis import ScoredToken, score
from lmhead.analysis.score import windows
from lmhead.models import LanguageModel

TEXT = "hello hello 你好 abc cab hello lo elo\n" * 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return tiny(tmp_path_factory.mktemp("model"))


def dense(model: LanguageModel, text: str, window: int, stride: int) -> torch.Tensor:
    """The log-probability of every token but the first, from whole logits in float32."""
    assert model.tokenizer is not None
    ids = torch.tensor(model.tokenizer.encode(text))
    found = torch.full((len(ids),), math.nan)
    for start in range(0, len(ids) - 1, stride):
        part = ids[start : start + window]
        logits = model.hidden(part[None])[0][0] @ model.head.weight.T
        log_p = logits.log_softmax(-1)
        for i in range(len(part)):
            at = start + i + 1
            if at < len(ids) and found[at].isnan():
                found[at] = log_p[i, ids[at]]
        if start + window >= len(ids) - 1:
            break
    return found[1:]


@pytest.mark.parametrize(
    ("window", "stride"), [(64, 32), (64, 64), (16, 5), (7, 7), (3, 1), (1, 1)]
)
def test_a_sliding_window_is_dense_windows(model: LanguageModel, window: int, stride: int) -> None:
    every: list[ScoredToken] = []
    result = score(model, TEXT, window=window, stride=stride, on_token=every.append)
    want = dense(model, TEXT, window, stride)
    assert not want.isnan().any()
    got = torch.tensor([s.token.log_prob for s in every])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert result.perplexity == pytest.approx(float((-want.double().mean()).exp()), rel=1e-4)
    assert [s.position for s in every] == list(range(1, len(want) + 1))


def test_every_figure_of_a_token(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    every: list[ScoredToken] = []
    score(model, "hello 你", on_token=every.append)
    ids = model.tokenizer.encode("hello 你")
    logits = (model.hidden(torch.tensor([ids]))[0][0] @ model.head.weight.T).double()
    for i, scored in enumerate(every):
        z, target = logits[i], ids[i + 1]
        p = z.softmax(-1)
        assert scored.token.piece.id == target
        assert scored.token.logit == pytest.approx(float(z[target]), abs=1e-5)
        assert scored.token.p == pytest.approx(float(p[target]), rel=1e-5)
        assert scored.token.rank == int((z > z[target]).sum())
        assert scored.entropy == pytest.approx(float(-(p * p.log()).sum()), abs=1e-5)
        assert scored.bits == pytest.approx(-math.log2(float(p[target])), rel=1e-5)
    assert b"".join(s.token.piece.bytes for s in every).decode() == "hello 你"


def test_sums_and_means(model: LanguageModel) -> None:
    every: list[ScoredToken] = []
    result = score(model, TEXT, on_token=every.append)
    assert result.tokens == len(every)
    assert result.log_prob == pytest.approx(sum(s.token.log_prob for s in every))
    assert result.bytes == len(TEXT.encode())  # the first token is a mark, which has no bytes
    assert result.bits_per_byte == pytest.approx(-result.log_prob / math.log(2) / result.bytes)
    assert result.bits_per_token == pytest.approx(math.log2(result.perplexity))
    assert result.entropy == pytest.approx(sum(s.entropy for s in every) / len(every))
    assert result.first_choices == sum(s.token.rank == 0 for s in every)
    assert result.in_top_10 == sum(s.token.rank < 10 for s in every)
    assert (result.window, result.stride) == (64, 32)


def test_pieces_are_the_text(model: LanguageModel) -> None:
    assert score(model, [TEXT[i : i + 3] for i in range(0, len(TEXT), 3)]) == score(model, TEXT)


@pytest.mark.parametrize("length", range(2, 30))
@pytest.mark.parametrize(("window", "stride"), [(8, 3), (8, 8), (4, 1), (1, 1)])
def test_every_token_is_scored_once(length: int, window: int, stride: int) -> None:
    ids = list(range(length))
    cut = list(windows([ids[:3], ids[3:4], ids[4:]], window, stride))
    assert [id for part, fresh in cut for id in part[-fresh:]] == ids[1:]
    assert all(len(part) <= window + 1 for part, _ in cut)
    assert all(b[0] - a[0] == stride for (a, _), (b, _) in pairwise(cut))


def test_mistakes(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="text must have at least two tokens"):
        score(model, "")
    with pytest.raises(ValueError, match=r"window must be in \[1, 64\]; got 65"):
        score(model, TEXT, window=65)
    with pytest.raises(ValueError, match=r"stride must be in \[1, 8\]; got 9"):
        score(model, TEXT, window=8, stride=9)


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Twelve times the text: the peak is no higher than the bound of one window allows."""
    path = write_model(tmp_path)
    code = f"""
import resource, torch
torch.set_num_threads(1)
from lmhead.analysis import score
from lmhead.models import open_model
model = open_model({str(path)!r})
peaks = []
for times in (1, 12):
    score(model, ("hello ab cab 你好 lo el\\n" * 40 for _ in range(3 * times)), stride=64)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[1] - peaks[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 8 * 2**20


def test_keys_and_values_are_not_kept(model: LanguageModel) -> None:
    """They would take as much memory as the rest of a window."""
    ids = torch.tensor([[1, 40, 41]])
    hidden, cache = model.hidden(ids, use_cache=False)
    assert cache.keys == ()
    assert torch.equal(hidden, model.hidden(ids)[0])
