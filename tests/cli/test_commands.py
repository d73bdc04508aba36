"""next, score, generate, lens, compare: what they print, as table and JSON, and when they fail."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from click import unstyle
from click.testing import CliRunner, Result
from tiny_models import write_model

from lmhead.analysis import logit_lens, next_words, score
from lmhead.cli import _reference, main
from lmhead.cli._terminal import columns
from lmhead.models import open_model
from lmhead.sampling import Sampler, generate

ROOT = Path(__file__).resolve().parents[2]
TEXT = "hello ab 你 cab hello\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("other"), seed=1))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes((TEXT * 20).encode())
    return str(path)


def run(*arguments: str, code: int = 0, **more: Any) -> Result:
    result = CliRunner().invoke(main, arguments, **more)
    assert result.exit_code == code, result.output
    return result


def document(*arguments: str, **more: Any) -> dict[str, Any]:
    result = run(*arguments, "--json", **more)
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema"] == 1
    assert found["command"] == arguments[0]
    return found


# next


def test_next_as_a_table(model: str) -> None:
    lines = run("next", model, "hello", "--top", "3").stdout.splitlines()
    assert "  hello ___" in lines
    head = next(i for i, line in enumerate(lines) if "logit" in line)
    best = next_words(open_model(model), "hello", top=3)
    for line, token in zip(lines[head + 1 :], best.tokens, strict=False):
        assert f"{token.piece.id}" in line.split()
        assert f"{token.logit:.3f}" in line
        assert f"{token.p:.4f}" in line
    assert f"  entropy  {best.entropy:.3f} nats" in "\n".join(lines)


def test_next_as_json(model: str) -> None:
    found = document("next", model, "hello", "--top-k", "2", "--top", "4")
    want = next_words(open_model(model), "hello", top=4, sampler=Sampler(top_k=2, seed=0))
    assert found["tokens"] == [t.to_json() for t in want.tokens]
    assert [t["cut_by"] for t in found["tokens"]] == [None, None, "top_k", "top_k"]


def test_next_shows_what_cut_a_word(model: str) -> None:
    text = run("next", model, "hello", "--top-p", "0.5", "--temperature", "0.7").stdout
    assert "cut by" in text
    assert re.search(r"top_p\s*$", text, re.MULTILINE)
    assert re.search(r"temperature\s+cuts no word", text)


# score


def test_score_of_a_text(model: str) -> None:
    found = document("score", model, "--text", TEXT)
    want = score(open_model(model), TEXT)
    assert found["perplexity"] == pytest.approx(want.perplexity)
    assert found["scored_tokens"] == want.tokens == len(found["tokens"])
    assert bytes(b for t in found["tokens"] for b in t["bytes"]).decode() == TEXT
    assert found["log_prob"] == pytest.approx(sum(t["log_prob"] for t in found["tokens"]))
    table = run("score", model, "--text", TEXT).stdout
    assert f"{want.perplexity:,.4f}" in table
    assert "\\n" in table


def test_score_of_a_file_and_of_standard_input(model: str, file: str) -> None:
    found = document("score", model, file, "--window", "16", "--stride", "16")
    assert found["tokens"] is None
    assert (found["window"], found["stride"]) == (16, 16)
    piped = document(
        "score", model, "-", "--window", "16", "--stride", "16", input=Path(file).read_bytes()
    )
    assert piped == found
    listed = document("score", model, file, "--tokens", "--window", "16", "--stride", "16")
    assert len(listed["tokens"]) == found["scored_tokens"]
    assert listed["perplexity"] == found["perplexity"]


def test_score_shows_the_worst(model: str, file: str) -> None:
    text = run("score", model, file, "--worst", "3").stdout
    lines = text.split("most surprising\n")[1].strip().splitlines()[:3]
    bits = [float(line.split()[0]) for line in lines]
    assert bits == sorted(bits, reverse=True)
    assert len(bits) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{model}", "{missing}"], 3, "missing.txt cannot be read: No such file"),
        (["{model}", "{binary}"], 3, "must be text in UTF-8; byte 5 is not"),
        (["{model}", "{file}", "--text", "a"], 2, "not both"),
        (["{model}", "{file}", "--window", "100"], 2, "--window must be at most 64"),
        (["{model}", "{file}", "--window", "8", "--stride", "9"], 2, "--stride must be at most"),
        (["{model}", "--text", ""], 1, "Text must have at least two tokens"),
        ([], 2, "Missing argument 'FILE'"),
        (["smollm2"], 2, "Missing argument 'FILE': smollm2 is a model"),
    ],
)
def test_score_and_mistakes(
    model: str, file: str, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "binary.txt").write_bytes(b"abcde\xff\xfe")
    names = {
        "model": model,
        "file": file,
        "missing": tmp_path / "missing.txt",
        "binary": tmp_path / "binary.txt",
    }
    result = run("score", *(a.format(**names) for a in arguments), code=code)
    assert said in result.stderr
    assert "Traceback" not in result.output


# generate


def test_generate_greedy(model: str) -> None:
    want = generate(open_model(model), "hello", max_new_tokens=8)
    assert run("generate", model, "hello", "-n", "8").stdout == "hello" + want.text + "\n"


def test_generate_with_a_sampler(model: str) -> None:
    sampler = Sampler(temperature=2.0, top_k=50, seed=3, eos_token_id=[1, 2])
    want = generate(open_model(model), "hello", sampler, max_new_tokens=12)
    arguments = ["generate", model, "hello", "-n", "12", "--temperature", "2", "--top-k", "50"]
    assert run(*arguments, "--seed", "3").stdout == "hello" + want.text + "\n"
    found = document(*arguments, "--seed", "3")
    assert [t["id"] for t in found["generations"][0]["tokens"]] == want.tokens
    assert found["seed"] == 3


def test_a_seed_is_drawn_and_told(model: str) -> None:
    arguments = ["generate", model, "hello", "-n", "12", "--temperature", "3"]
    found = document(*arguments)
    again = document(*arguments, "--seed", str(found["seed"]))
    assert again["generations"] == found["generations"]


def test_several_prompts_and_log_probabilities(model: str) -> None:
    arguments = ["generate", model, "hello", "-p", "ab", "-n", "3", "--logprobs", "2"]
    found = document(*arguments)
    assert [g["prompt"] for g in found["generations"]] == ["hello", "ab"]
    for generation in found["generations"]:
        for token in generation["tokens"]:
            assert len(token["top"]) == 2
            assert token["log_prob"] == pytest.approx(token["top"][0]["log_prob"])
    table = run(*arguments).stdout
    assert table.count("best words") == 2


def test_generate_stops(model: str) -> None:
    whole = generate(open_model(model), "hello", max_new_tokens=20, eos_token_ids=()).text
    stop = whole[3:5]
    arguments = ["generate", model, "hello", "-n", "20", "--ignore-eos", "--stop", stop]
    found = document(*arguments)["generations"][0]
    assert found["text"] == whole[: whole.index(stop)]
    assert (found["finish_reason"], found["stopped_by"]) == ("stop", stop)


@pytest.mark.parametrize("options", [[], ["--temperature", "0.9", "--seed", "5"]])
def test_generate_through_certified_decode(model: str, options: list[str]) -> None:
    arguments = ["generate", model, "hello", "-n", "10", "--ignore-eos", *options]
    plain, screened = run(*arguments), run(*arguments, "--screen")
    assert screened.stdout == plain.stdout
    assert "Certified decode: 10 tokens" in screened.stderr
    found = document(*arguments, "--screen")
    assert found["screen"]["choices"] == 10
    assert found["screen"]["bytes_read"] > 0


def test_generate_with_beams(model: str) -> None:
    arguments = ["generate", model, "hello", "-n", "4", "--beams", "3", "--num-return", "2"]
    beams = document(*arguments)["generations"][0]["beams"]
    assert len(beams) == 2
    assert beams[0]["score"] >= beams[1]["score"]
    assert beams[0]["text"] in run(*arguments).stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--beams", "2", "--screen"],
        ["--beams", "2", "--stop", "a"],
        ["--num-return", "2"],
        ["--beams", "2", "--num-return", "3"],
        ["--stop", ""],
        ["--screen", "--logprobs", "2"],
        ["--screen", "--mirostat", "2"],
        ["--top-p", "2"],
    ],
)
def test_generate_and_what_does_not_go_together(model: str, options: list[str]) -> None:
    assert "Error: " in run("generate", model, "hello", *options, code=2).stderr


def test_an_interrupted_generation_keeps_what_it_has(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmhead.cli.generate import _Run

    seen: list[object] = []

    def third_is_the_last(_: object, event: object) -> None:
        seen.append(event)
        if len(seen) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Run, "_event", third_is_the_last)
    result = run("generate", model, "hello", "-n", "9", "--ignore-eos", code=130)
    assert len(seen) == 3
    assert result.stdout == "hello\n"


def test_a_terminal_obeys_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmhead.cli.generate import _write

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen, file = Terminal(), io.StringIO()
    for out in (screen, file):
        monkeypatch.setattr("sys.stdout", out)
        _write("a\x1b[2Jb\n")
    monkeypatch.undo()
    assert screen.getvalue() == "a\\x1b[2Jb\n"
    assert file.getvalue() == "a\x1b[2Jb\n"


# lens


def test_lens(model: str) -> None:
    found = document("lens", model, "hello ab", "--top", "2")
    assert found["layers"] == logit_lens(open_model(model), "hello ab", top=2).to_json()["layers"]
    text = run("lens", model, "hello ab").stdout
    rows = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert rows[-4:-1] == ["emb", "1", "out"]


def test_lens_of_a_word(model: str) -> None:
    found = document("lens", model, "hello", "--target", "el")
    assert {t["text"] for t in found["targets"]} == {"el"}
    result = run("lens", model, "hello", "--target", "no such word", code=2)
    assert "--target must be one token" in result.stderr


# compare


def test_compare_models(model: str, other: str, file: str) -> None:
    found = document("compare", model, other, file)
    assert found["kl"] > 0
    assert found["perplexity"][0] == pytest.approx(
        document("score", model, file, "--stride", "64")["perplexity"], rel=1e-4
    )
    text = run("compare", model, other, file).stdout
    assert f"{found['kl']:.6f}" in text
    assert "furthest apart" in text


def test_compare_with_itself_shows_no_difference(model: str) -> None:
    text = run("compare", model, model, "--text", TEXT, "--fail-above", "0").stdout
    assert "100.00%" in text
    assert "furthest apart" not in text


@pytest.mark.parametrize(("limit", "code"), [("0.0001", 4), ("1000", 0)])
@pytest.mark.parametrize("metric", ["kl", "max-kl", "disagreement"])
def test_a_threshold(model: str, other: str, limit: str, code: int, metric: str) -> None:
    arguments = ["compare", model, other, "--text", TEXT, "--metric", metric]
    result = run(*arguments, "--fail-above", limit, code=code)
    assert ("Failed: " + metric in result.stderr) == (code == 4)


def test_compare_samplers(model: str) -> None:
    arguments = ["compare", model, "--text", TEXT, "--sampler-a", "", "--sampler-b", "top_k=3"]
    found = document(*arguments)
    assert found["kl"] is None  # what one side rules out is infinitely far
    assert 0 < found["total_variation"] < 1
    run(*arguments, "--fail-above", "100", code=4)
    run(*arguments, "--fail-above", "1", "--metric", "tv")
    assert "inf" in run(*arguments).stdout


def test_other_tokens_are_refused(model: str, tmp_path: Path) -> None:
    stranger = str(write_model(tmp_path, words=["x", "y"]))
    result = run("compare", model, stranger, "--text", "hello", code=2)
    assert "different vocabularies" in result.stderr
    assert "about the same words" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["{model}", "--text", "a"],
        ["{model}", "{model}", "{model}", "{file}"],
        ["{model}", "{model}", "--text", "a", "--metric", "tv"],
        ["{model}", "{model}", "{file}", "--sampler-a", "top_k=1"],
        ["{model}", "--text", "a", "--sampler-a", "nonsense=1"],
        ["{model}", "--text", "a", "--sampler-a", "top_p=7"],
    ],
)
def test_compare_and_mistakes(model: str, file: str, arguments: list[str]) -> None:
    given = [a.format(model=model, file=file) for a in arguments]
    assert "Error: " in run("compare", *given, code=2).stderr


# All of them


def commands(model: str, other: str, file: str) -> dict[str, list[str]]:
    return {
        "next": [model, "hello 你 ab", "--top-p", "0.9"],
        "score": [model, file],
        "generate": [model, "hello", "-n", "5", "--logprobs", "2"],
        "lens": [model, "hello 你 ab cab"],
        "compare": [model, other, file],
        "inspect": [model],
        "check": [model, "--tokens", "4"],
        "doctor": [],
    }


@pytest.mark.parametrize("name", ["next", "score", "generate", "lens", "compare"])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_output_fits_the_terminal(name: str, width: int, model: str, other: str, file: str) -> None:
    arguments = commands(model, other, file)[name]
    text = run(name, *arguments, env={"COLUMNS": str(width)}).stdout
    assert "\x1b" not in text
    assert max(columns(line) for line in text.splitlines()) <= max(width, 80)
    assert not [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("name", ["next", "score", "lens", "compare"])
def test_colours_only_where_they_are_wanted(name: str, model: str, other: str, file: str) -> None:
    arguments = commands(model, other, file)[name]
    coloured = run(name, *arguments, color=True).stdout
    assert "\x1b[" in coloured
    plain = run(name, *arguments, color=True, env={"NO_COLOR": "1"}).stdout
    assert plain == unstyle(coloured)


@pytest.mark.parametrize(
    "name", ["next", "score", "generate", "lens", "compare", "inspect", "check", "doctor"]
)
def test_every_field_is_documented(name: str, model: str, other: str, file: str) -> None:
    page = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    common = page.split("\n## A token")[0]
    found = document(name, *commands(model, other, file)[name])
    for field in found:
        assert f"| `{field}` |" in section + common or field in "ab", field
    for field in re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE):
        assert field in found or (name == "doctor" and found["core"] != "native"), field
    if "model" in found:
        assert set(found["model"]) == {"name", "vocab_size", "hidden_size", "max_length"}
    assert all(math.isfinite(x) for x in found.values() if isinstance(x, float))


def test_a_token_is_what_the_page_says(model: str) -> None:
    page = (ROOT / "docs/json.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \|", page.split("## A token")[1].split("\n## ")[0], re.M)
    assert list(document("next", model, "a")["tokens"][0]) == listed
    assert set(document("score", model, "--text", "ab")["tokens"][0]) > set(listed)


def test_the_command_reference_is_up_to_date() -> None:
    assert _reference.PAGE.read_text(encoding="utf-8") == _reference.page(), (
        "the help pages have changed: python -m lmhead.cli._reference"
    )
