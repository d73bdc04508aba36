"""`logit_lens`: every cell is the head on that layer, and the last layer is the model."""

import math

import pytest
import torch
from tiny_models import tiny
from torch_watch import count_products

from lmhead.analysis import logit_lens, next_tokens
from lmhead.analysis.lens import stream_lens
from lmhead.analysis.token_text import find_token
from lmhead.models import LanguageModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    model = tiny(tmp_path_factory.mktemp("model"))
    model.head.softcap = 3.0  # a lens that forgets the map of the head would show other figures
    return model


def test_every_cell_is_the_head_on_its_layer(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("hello ab")
    found = logit_lens(model, "hello ab", top=3)
    layers = model.layers(torch.tensor([ids]))
    assert len(found.cells) == len(layers) == 3

    def log_probs(layer: torch.Tensor) -> torch.Tensor:
        z = layer[0].double() @ model.head.weight.double().T
        return (3.0 * (z / 3.0).tanh()).log_softmax(-1)

    last = log_probs(layers[-1])
    for row, layer in zip(found.cells, layers, strict=True):
        p = log_probs(layer).exp()
        kl = (p * (p.log() - last)).sum(-1)
        for i, cell in enumerate(row):
            best = p[i].topk(3)
            assert [piece.id for piece, _ in cell.best] == best.indices.tolist()
            assert [q for _, q in cell.best] == pytest.approx(best.values.tolist(), rel=1e-5)
            target = found.targets[i].id
            assert cell.target_p == pytest.approx(float(p[i, target]), rel=1e-5)
            assert cell.target_rank == int((p[i] > p[i, target]).sum())
            assert cell.entropy == pytest.approx(float(-(p[i] * p[i].log()).sum()), rel=1e-5)
            assert cell.kl == pytest.approx(float(kl[i]), rel=1e-5, abs=1e-12)
    assert all(cell.kl > 0.01 for row in found.cells[:-1] for cell in row)
    assert all(0 <= cell.kl < 1e-12 for cell in found.cells[-1])


def test_the_targets_are_what_follows(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("hello ab")
    found = logit_lens(model, "hello ab")
    assert [t.id for t in found.targets[:-1]] == ids[1:]
    assert found.cells[-1][-1].target_rank == 0
    assert found.targets[-1] == found.cells[-1][-1].best[0][0]


def test_the_last_layer_is_the_model(model: LanguageModel) -> None:
    top = next_tokens(model, "hello", top=5).tokens
    last = logit_lens(model, "hello", top=5).cells[-1][-1].best
    assert [piece for piece, _ in last] == [token.piece for token in top]
    assert [p for _, p in last] == pytest.approx([token.p for token in top])


def test_a_target_of_ones_own(model: LanguageModel) -> None:
    found = logit_lens(model, "hello", target=7)
    assert {t.id for t in found.targets} == {7}
    assert all(0 < c.target_p < 1 and 0 <= c.target_rank < 300 for row in found.cells for c in row)
    with pytest.raises(ValueError, match=r"target must be in \[0, 299\]; got 300"):
        logit_lens(model, "hello", target=300)


def test_json(model: LanguageModel) -> None:
    document = logit_lens(model, "ab", top=2).to_json()
    assert [layer["layer"] for layer in document["layers"]] == [0, 1, 2]
    cell = document["layers"][1]["cells"][0]
    assert set(cell) == {"best", "entropy", "target_p", "target_rank", "kl"}
    assert set(cell["best"][0]) == {"id", "text", "bytes", "p"}
    assert math.isfinite(cell["entropy"])


def test_rows_come_one_by_one(model: LanguageModel) -> None:
    want = logit_lens(model, "hello", top=2)
    found = list(stream_lens(model, "hello", top=2))
    assert [len(lens.cells) for lens, _ in found] == list(range(len(want.cells) + 1))
    assert {count for _, count in found} == {len(want.cells)}
    assert found[-1][0] == want
    assert found[0][0].targets == want.targets


def test_a_target_is_a_token_of_the_text(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    assert [model.tokenizer.token_bytes(id) for id in (100, 260)] == [b"a", b"a"]
    assert find_token(model, "a") == 260
    assert find_token(model, "d") == 103  # as a byte alone
    assert find_token(model, "no such word") is None


def test_the_output_is_computed_once_for_all_layers(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    text = "hello ab hello ab"
    ids = torch.tensor([model.tokenizer.encode(text)])
    vocab, width = model.head.weight.shape
    size = (ids.shape[1], width, vocab)
    body = count_products(lambda: model.layers(ids), *size)
    whole = count_products(lambda: logit_lens(model, text, target=7), *size)
    assert whole - body == pytest.approx(len(model.layers(ids)) + 1)  # each layer, and the output


def test_an_output_that_is_too_large_to_keep(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = logit_lens(model, "hello ab", top=2)
    monkeypatch.setattr(model.head, "max_bytes", 8000)
    found = logit_lens(model, "hello ab", top=2)
    for row, same in zip(found.cells, want.cells, strict=True):
        assert [c.kl for c in row] == pytest.approx([c.kl for c in same], rel=1e-5)
        assert [c.target_rank for c in row] == [c.target_rank for c in same]
