"""`lmhead generate`: what it writes, as text and as JSON, and when it fails."""

import io

import pytest

from cli.run_command import document, run
from lmhead.models import open_model
from lmhead.sampling import Sampler, generate


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
    assert table.count("best tokens") == 2


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


@pytest.mark.parametrize(
    "option",
    [
        ["--temperature", "0.7"],
        ["--temperature", "0"],
        ["--do-sample"],
        ["--seed", "0"],
        ["--xtc-probability", "0.5"],
        ["--mirostat", "2"],
        ["--dynatemp-range", "0.5"],
    ],
)
def test_beam_search_refuses_options_of_sampling(model: str, option: list[str]) -> None:
    found = run("generate", model, "hello", "--beams", "2", *option, code=2).stderr
    message = f"--beams and {option[0]} cannot be combined: beam search does not sample."
    assert found.splitlines()[-1] == f"Error: {message}"


def test_beam_search_takes_penalties(model: str) -> None:
    arguments = ["generate", model, "hello", "-n", "4", "--beams", "2", "--no-do-sample"]
    plain = document(*arguments)["generations"][0]["beams"][0]["ids"]
    changed = document(*arguments, "--suppress-tokens", str(plain[0]))
    assert plain[0] not in changed["generations"][0]["beams"][0]["ids"]


def test_an_interrupted_generation_keeps_what_it_has(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmhead.cli.cmd_generate import _Run

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
    from lmhead.cli.cmd_generate import _write

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
