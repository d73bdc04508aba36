"""`lmhead next`, `score` and `lens`: what a model makes of a text, as table and JSON."""

import json
import re
from pathlib import Path

import pytest

from cli.run_command import TEXT, document, run
from lmhead.analysis import logit_lens, next_tokens, score
from lmhead.models import open_model
from lmhead.sampling import Sampler


def test_next_as_a_table(model: str) -> None:
    lines = run("next", model, "hello", "--top", "3").stdout.splitlines()
    assert "  hello ___" in lines
    head = next(i for i, line in enumerate(lines) if "logit" in line)
    best = next_tokens(open_model(model), "hello", top=3)
    for line, token in zip(lines[head + 1 :], best.tokens, strict=False):
        assert f"{token.piece.id}" in line.split()
        assert f"{token.logit:.3f}" in line
        assert f"{token.p:.4f}" in line
    assert f"  entropy  {best.entropy:.3f} nats" in "\n".join(lines)


def test_next_as_json(model: str) -> None:
    found = document("next", model, "hello", "--top-k", "2", "--top", "4")
    want = next_tokens(open_model(model), "hello", top=4, sampler=Sampler(top_k=2, seed=0))
    assert found["tokens"] == [t.to_json() for t in want.tokens]
    assert [t["cut_by"] for t in found["tokens"]] == [None, None, "top_k", "top_k"]


def test_next_counts_what_was_written(model: str) -> None:
    """A frequency penalty counts the tokens after --prompt-length only."""
    options = ("next", model, "hello ab ab", "--frequency-penalty", "5", "--top", "300")
    opened, sampler = open_model(model), Sampler(frequency_penalty=5.0, seed=0)
    seen = []
    for length in (None, 0, 1):
        more = () if length is None else ("--prompt-length", str(length))
        found = document(*options, *more)
        want = next_tokens(opened, "hello ab ab", top=300, sampler=sampler, prompt_length=length)
        assert found["tokens"] == json.loads(json.dumps(want.to_json()["tokens"]))
        seen.append({token["id"]: token["processed_p"] for token in found["tokens"]})
    ids = {token["id"] for token in found["prompt"]}
    assert all(seen[1][id] < seen[0][id] for id in ids)
    assert {id for id in ids if seen[2][id] > seen[1][id]} == {found["prompt"][0]["id"]}


def test_next_shows_what_cut_a_token(model: str) -> None:
    text = run("next", model, "hello", "--top-p", "0.5", "--temperature", "0.7").stdout
    assert "removed by" in text
    assert re.search(r"top_p\s*$", text, re.MULTILINE)
    assert re.search(r"temperature\s+removes no token", text)


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
    ("arguments", "code", "message"),
    [
        (["{model}", "{missing}"], 3, "missing.txt cannot be read: No such file"),
        (["{model}", "{binary}"], 3, "must be text in UTF-8; byte 5 is not"),
        (["{model}", "/dev/zero"], 3, "/dev/zero must be text; byte 0 is NUL"),
        (["{model}", "{file}", "--text", "a"], 2, "not both"),
        (["{model}", "{file}", "--window", "100"], 2, "--window must be at most 64"),
        (["{model}", "{file}", "--window", "8", "--stride", "9"], 2, "--stride must be at most"),
        (["{model}", "--text", ""], 1, "Text must have at least two tokens"),
        ([], 2, "Missing argument 'FILE'"),
        (["smollm2"], 2, "Missing argument 'FILE': smollm2 is a model"),
    ],
)
def test_score_and_mistakes(
    model: str, file: str, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "binary.txt").write_bytes(b"abcde\xff\xfe")
    names = {
        "model": model,
        "file": file,
        "missing": tmp_path / "missing.txt",
        "binary": tmp_path / "binary.txt",
    }
    result = run("score", *(a.format(**names) for a in arguments), code=code)
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_lens(model: str) -> None:
    found = document("lens", model, "hello ab", "--top", "2")
    assert found["layers"] == logit_lens(open_model(model), "hello ab", top=2).to_json()["layers"]
    text = run("lens", model, "hello ab").stdout
    rows = [line.split()[0] for line in text.splitlines() if line.strip()]
    assert rows[-4:-1] == ["emb", "1", "out"]


def test_lens_of_a_token(model: str) -> None:
    found = document("lens", model, "hello", "--target", "el")
    assert {t["text"] for t in found["targets"]} == {"el"}
    result = run("lens", model, "hello", "--target", "no such word", code=2)
    assert "--target must be one token" in result.stderr


def test_score_to_a_file_and_again(model: str, file: str, tmp_path: Path) -> None:
    other, out = tmp_path / "other.txt", tmp_path / "rows.jsonl"
    other.write_text("hello cab ab\n")
    found = document("score", model, file, str(other), "--out", str(out), "--top-k", "2")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert found["scored_tokens"] == len(rows) == sum(f["scored_tokens"] for f in found["files"])
    assert [f["file"] for f in found["files"]] == [file, str(other)]
    for one in found["files"]:
        alone = document("score", model, one["file"])
        assert {name: one[name] for name in alone if name in one} == {
            name: value for name, value in alone.items() if name in one
        }
    assert found["log_prob"] == pytest.approx(sum(row["log_prob"] for row in rows))
    again = run("score", model, file, "--out", str(out), code=2)
    assert "exists; choose another --out" in again.stderr
    assert "1 is not" not in run("score", model, file, "--out", str(out), "--restart").stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "rows.csv"], "--out must end in .jsonl or .parquet"),
        (["--out", "missing/rows.jsonl"], "the folder of --out must exist"),
        (["--out", "rows.jsonl", "--tokens"], "cannot be combined"),
        (["--top-k", "3"], "--top-k needs --out"),
        (["--restart"], "--restart needs --out"),
        (["--out", "rows.jsonl", "--top-k", "301"], "--top-k must be at most 300"),
    ],
)
def test_mistakes_with_out(
    options: list[str],
    message: str,
    model: str,
    file: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in run("score", model, file, *options, code=2).stderr
    assert list(tmp_path.iterdir()) == []
