"""Inputs: generated ones as peaked as a trained model, real ones where they exist."""

import math
from pathlib import Path

import pytest
import torch
from compare import assert_close
from shared_data import SMOLLM2_HEAD, SMOLLM2_STATES, needs

from benchmarks import model_inputs
from benchmarks.inputs import ENTROPY, Inputs, generate, mean_entropy
from benchmarks.shapes import SHAPES, parse_shape


def test_the_entropy_is_that_of_a_trained_model() -> None:
    inputs = generate(5000, 32, 200)
    assert inputs.entropy == pytest.approx(ENTROPY, abs=0.05)
    assert mean_entropy(inputs.hidden @ inputs.weight.T) == pytest.approx(inputs.entropy, abs=1e-3)


def test_the_entropy_can_be_chosen() -> None:
    assert generate(2000, 16, 100, entropy=1.5).entropy == pytest.approx(1.5, abs=0.05)


def test_the_targets_are_drawn_from_the_distributions() -> None:
    """A calibrated model: the mean loss is near the mean entropy."""
    inputs = generate(2000, 32, 1000)
    log_p = (inputs.hidden @ inputs.weight.T).log_softmax(-1)
    loss = -float(log_p.gather(1, inputs.targets[:, None]).mean())
    assert loss == pytest.approx(inputs.entropy, abs=0.3)


def test_the_entropy_varies_between_rows() -> None:
    inputs = generate(5000, 32, 200)
    log_p = (inputs.hidden @ inputs.weight.T).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    assert 1.0 < float(entropy.std()) < 2.5


def test_a_small_vocabulary_has_less_entropy() -> None:
    assert generate(50, 8, 100).entropy == pytest.approx(math.log(50) / 2, abs=0.2)


def test_the_same_seed_gives_the_same_numbers() -> None:
    a, b, c = generate(100, 8, 10), generate(100, 8, 10), generate(100, 8, 10, seed=1)
    assert torch.equal(a.hidden, b.hidden)
    assert torch.equal(a.targets, b.targets)
    assert not torch.equal(a.hidden, c.hidden)


def test_files_keep_types_and_numbers(tmp_path: Path) -> None:
    inputs = generate(100, 8, 10).to("bfloat16")
    inputs.save(tmp_path / "inputs.pt")
    read = Inputs.load(tmp_path / "inputs.pt")
    assert_close(read.weight, inputs.weight, atol=0, dtype=torch.bfloat16)
    assert read.origin == inputs.origin


def test_a_folder_without_the_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="data must be a folder with wt2_hidden_2048"):
        model_inputs.data_folder(tmp_path)
    monkeypatch.setenv(model_inputs.ENVIRONMENT, str(tmp_path))
    with pytest.raises(ValueError, match="data must be a folder"):
        model_inputs.data_folder()


def test_without_real_data_inputs_are_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(model_inputs.ENVIRONMENT, raising=False)
    monkeypatch.setattr(model_inputs, "DATA", tmp_path)
    monkeypatch.setattr(model_inputs, "from_package", lambda _: None)
    made = model_inputs.make_inputs(parse_shape("smollm2", tokens=4), "float32")
    assert made.origin.startswith("generated")
    assert tuple(made.weight.shape) == (49152, 576)


@needs(SMOLLM2_STATES, SMOLLM2_HEAD)
def test_real_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(model_inputs.ENVIRONMENT, raising=False)
    inputs = model_inputs.make_inputs(parse_shape("smollm2", tokens=64), "float32")
    assert inputs.origin == "SmolLM2-135M on WikiText-2"
    loss = torch.nn.functional.cross_entropy(inputs.hidden @ inputs.weight.T, inputs.targets)
    assert 2.0 < float(loss) < 4.5
    assert 1.0 < inputs.entropy < 5.0


def test_shapes() -> None:
    assert parse_shape("llama-3.2-1b").hidden_size == 2048
    assert parse_shape("1000x8", tokens=3).tokens == 3
    assert parse_shape("1000000x1000").tokens == 34
    assert set(SHAPES) == {"smollm2", "gpt2", "llama-3.2-1b", "qwen", "gemma-3-270m"}
    for text in ("", "gpt5", "12", "100x", "100x-3", "8x8", "100x1"):
        with pytest.raises(ValueError, match="shape must"):
            parse_shape(text)
