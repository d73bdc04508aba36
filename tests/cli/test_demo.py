"""`lmhead demo --toy`: its figures are the textbook's, it fits the terminal, it loads no torch."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click import unstyle
from click.testing import CliRunner
from llama2c_files import random_weights, write_checkpoint
from tiny_models import write_model

from lmhead import reference as ref
from lmhead.cli import cmd_demo as demo
from lmhead.cli import main
from lmhead.cli._terminal import columns, printable
from lmhead.cli._toy_demo import (
    HIDDEN,
    LEARNING_RATE,
    SEED,
    TARGET,
    TEMPERATURES,
    WEIGHT,
    WORDS,
)
from lmhead.models import bundled, open_model

LANGUAGES = ["en", "zh"]
LOGITS = ref.head_logits(HIDDEN, WEIGHT)
P = ref.softmax(LOGITS)


def _demo(lang: str, *, color: bool = False, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(main, ["demo", "--toy", "--lang", lang], color=color, env=env)
    assert result.exit_code == 0, result.output
    return result.output


def _section(text: str, number: int) -> list[str]:
    """The lines between the heading of a section and the next heading."""
    after = text.split(f"\n  {number}. ")[1]
    return re.split(r"\n  \d\. ", after)[0].splitlines()[1:]


def _figures(text: str, number: int, word: str) -> list[float]:
    """The numbers in the row of a word, in one section."""
    rows = [line for line in _section(text, number) if line.strip().startswith(word + " ")]
    assert len(rows) == 1
    return [float(x) for x in re.findall(r"[+-]?\d+\.?\d*", rows[0])]


@pytest.mark.parametrize("lang", LANGUAGES)
@pytest.mark.parametrize("i", range(6))
def test_every_figure_is_the_textbooks(lang: str, i: int) -> None:
    text, word = _demo(lang), WORDS[lang][i]
    assert _figures(text, 2, word)[:3] == WEIGHT[i].tolist()
    assert _figures(text, 2, word)[-1] == pytest.approx(LOGITS[i], abs=0.005)

    shifted = LOGITS - LOGITS.max()
    expected = [LOGITS[i], shifted[i], np.exp(shifted[i]), P[i]]
    assert _figures(text, 3, word) == pytest.approx(expected, abs=0.005)

    warmed = [ref.softmax(LOGITS, temperature=t)[i] for t in TEMPERATURES]
    assert _figures(text, 4, word) == pytest.approx(warmed, abs=0.0005)

    grad = ref.cross_entropy_backward(LOGITS, TARGET)
    assert _figures(text, 7, word) == pytest.approx([P[i], float(i == TARGET), grad[i]], abs=0.0005)

    weight = WEIGHT - LEARNING_RATE * np.outer(grad, HIDDEN)
    after = ref.softmax(ref.head_logits(HIDDEN, weight))
    assert _figures(text, 8, word) == pytest.approx([P[i], after[i]], abs=0.0005)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_dot_products_are_right(lang: str) -> None:
    """Each sum as printed, evaluated, is the logit printed behind it."""
    lines = [line for line in _section(_demo(lang), 2) if "×" in line]
    assert len(lines) == 6
    for line in lines:
        written, logit = line.split("]")[1].split("=")
        total = 0.0
        for sign, a, b in re.findall(r"([+-]?) ?(\d\.\d)×\(?(-?\d\.\d)\)?", written):
            total += (-1 if sign == "-" else 1) * float(a) * float(b)
        assert total == pytest.approx(float(logit))


@pytest.mark.parametrize("lang", LANGUAGES)
def test_entropy_loss_and_choices(lang: str) -> None:
    text, words = _demo(lang), WORDS[lang]
    entropies = [float(ref.entropy(LOGITS / t)) for t in TEMPERATURES]
    label = "entropy" if lang == "en" else "熵"
    assert _figures(text, 4, label) == pytest.approx(entropies, abs=0.0005)
    assert entropies == sorted(entropies)

    loss = float(ref.cross_entropy(LOGITS, TARGET))
    assert f"= {loss:.3f}\n" in text
    before, after = _figures(text, 8, "loss")
    assert before == pytest.approx(loss, abs=0.0005)
    assert after < before

    drawn = int(ref.sample_inverse_cdf(P, np.random.default_rng(SEED).random()))
    assert drawn != ref.greedy(LOGITS)  # or the two ways would look alike
    start = "I love " if lang == "en" else "我爱"
    for word in (words[int(ref.greedy(LOGITS))], words[drawn]):
        assert f"{start}{word}\n" in text


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_dart_lands_on_the_drawn_word(lang: str) -> None:
    lines = _section(_demo(lang), 5)
    at = next(i for i, line in enumerate(lines) if "▲" in line)
    dart = columns(lines[at].split("▲")[0])
    start = 0
    for piece in lines[at - 1].split("│"):
        end = start + columns(piece)
        if start <= dart < end:
            break
        start = end + 1
    drawn = int(ref.sample_inverse_cdf(P, np.random.default_rng(SEED).random()))
    assert piece.strip() == WORDS[lang][drawn]


@pytest.mark.parametrize("lang", LANGUAGES)
def test_fits_80_columns_and_lines_up(lang: str) -> None:
    text = _demo(lang)
    assert max(columns(line) for line in text.splitlines()) <= 80
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    axes = {columns(line.split("│")[0]) for line in _section(text, 7) if "│" in line}
    assert len(axes) == 1
    signs = {columns(line.split("=")[0]) for line in _section(text, 2) if "×" in line}
    assert len(signs) == 1


def test_both_languages_show_the_same_numbers() -> None:
    english, chinese = (re.findall(r"[+-]?\d+\.\d+", _demo(lang)) for lang in LANGUAGES)
    assert english == chinese


# Options and output


def test_colour_only_where_it_is_wanted() -> None:
    assert "\x1b[" not in _demo("en")
    coloured = _demo("en", color=True)
    assert "\x1b[" in coloured
    assert unstyle(coloured) == _demo("en")
    assert "\x1b[" not in _demo("en", color=True, env={"NO_COLOR": "1"})


def test_a_terminal_without_unicode_gets_plain_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ascii:
        encoding = "ascii"

    monkeypatch.setattr(sys, "stdout", Ascii())
    assert printable("│██▌ × 你") == "|### x ?"


def test_help_has_examples_and_a_bad_language_is_a_usage_error() -> None:
    help_text = CliRunner().invoke(main, ["demo", "--help"]).output
    assert "lmhead demo --toy --lang zh" in help_text
    assert CliRunner().invoke(main, ["demo", "--lang", "xx"]).exit_code == 2


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys; from lmhead.cli import main; main(['demo', '--toy'], standalone_mode=False); "
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


# On a real model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("lang", LANGUAGES)
def test_the_tour_of_a_model(model: str, lang: str) -> None:
    result = CliRunner().invoke(main, ["demo", "--model", model, "--lang", lang])
    assert result.exit_code == 0, result.output
    text = result.output
    assert [line[:4] for line in text.splitlines() if re.match(r"  \d\. ", line)] == [
        "  1.",
        "  2.",
        "  3.",
        "  4.",
    ]
    assert ("the same tokens" if lang == "en" else "词元逐个相同") in text
    assert "NOT" not in text
    assert max(columns(line) for line in text.splitlines()) <= 80
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert f"lmhead next {Path(model).stem}" in text


def test_the_figures_of_the_tour_are_the_models(model: str) -> None:
    opened = open_model(model)
    tokenizer = opened.tokenizer
    assert tokenizer is not None
    tour = demo.Tour(opened, tokenizer, chinese=False)
    ids = torch.tensor([tokenizer.encode(demo.PROMPT)])
    p = (opened.hidden(ids)[0][0, -1].double() @ opened.head.weight.double().T).softmax(-1)
    shown = [float(x) for x in re.findall(r" (0\.\d{4})", "\n".join(tour.next_token()))]
    assert shown[:8] == pytest.approx(p.topk(8).values.tolist(), abs=1e-4)
    ids = torch.tensor([tokenizer.encode(demo.SENTENCE)])
    logits = opened.hidden(ids)[0][0, :-1].double() @ opened.head.weight.double().T
    bits = -logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0] / np.log(2)
    lines = "\n".join(tour.surprisal())
    shown = [float(x) for x in re.findall(r"(\d+\.\d\d) bit", lines)]
    assert shown == pytest.approx(bits.tolist(), abs=0.006)
    assert f"Perplexity: {2 ** float(bits.mean()):.1f}." in lines


def test_without_any_model_there_is_the_toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "BUNDLED", {})
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.output
    assert "No model is installed" in result.stderr
    assert "I love ___" in result.stdout


def test_a_model_that_speaks_in_ids_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "mute.bin", random_weights())
    result = CliRunner().invoke(main, ["demo", "--model", str(path)])
    assert result.exit_code == 3
    assert "has no tokenizer" in result.stderr


@pytest.mark.parametrize("on_path", [True, False])
def test_suggested_commands_can_be_typed_as_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_path: bool
) -> None:
    beside = str(Path(sys.executable).parent)
    path = f"{beside}:/usr/bin:/bin" if on_path else "/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    for folder in (tmp_path, Path(sys.executable).parents[2]):
        monkeypatch.chdir(folder)
        program = demo.program()
        assert (program == "lmhead") == (on_path and Path(beside, "lmhead").exists())
        run = subprocess.run(["sh", "-c", f"{program} --version"], capture_output=True, check=False)
        assert run.returncode == 0, run.stderr
