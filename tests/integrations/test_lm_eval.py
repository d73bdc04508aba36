"""`LMHeadLM` and `lmhead eval`: what the harness's own `hf` and `local-completions` answer."""

import functools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from models import gguf_files
from preloaded_python import preloaded_python
from server.serve_tiny import listening
from tiny_models import tiny
from torch.utils import collect_env
from torch_watch import no_tensor_of

from integrations.harness import NAMES, TASKS, answers, assert_same, metrics, run, write_folder
from lmhead.cli import main
from lmhead.cli.cmd_eval import fingerprint
from lmhead.integrations.lm_eval import LMHeadLM, bytes_per_token, score_batch
from lmhead.models import LanguageModel, bundled, open_model
from lmhead.server import create_api_app

gguf: Any = pytest.importorskip("gguf")
huggingface: Any = pytest.importorskip("lm_eval.models.huggingface")
instance: Any = pytest.importorskip("lm_eval.api.instance")
completions: Any = pytest.importorskip("lm_eval.models.openai_completions")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and its dependencies
FAMILIES = {"gpt2": {"n_positions": 512}, "qwen2": {"max_position_embeddings": 512}}


DESCRIBED = functools.cache(collect_env.get_pretty_env_info)  # the machine, by `pip list`


@pytest.fixture(autouse=True)
def described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of the harness describes the machine in its results, which takes 0.6 s."""
    monkeypatch.setattr(collect_env, "get_pretty_env_info", DESCRIBED)


def request(kind: str, *arguments: Any) -> Any:
    return instance.Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    return write_folder(place, request.param, **FAMILIES[request.param])


def hf(folder: Path, **options: Any) -> Any:
    options = {"batch_size": 8, "device": "cpu", **options}
    with pytest.MonkeyPatch.context() as patch:  # transformers parses a GGUF file four times
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return huggingface.HFLM(pretrained=str(folder), **options)


def assert_backends_agree(model: LanguageModel, theirs: Any, length: int, **options: Any) -> None:
    """lmhead, and local-completions on our server, answer as `hf` does."""
    assert_same(run(LMHeadLM(model), **options), theirs)
    with listening(lambda hosts: create_api_app({"m": model}, hosts=hosts)) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        api = completions.LocalCompletionsAPI(
            base_url=url, model="m", max_length=length + 1, batch_size=4, tokenizer_backend="auto"
        )
        assert api.tokenizer_backend == "remote"
        assert_same(run(api, **options), theirs)


def test_three_backends_agree(folder: Path) -> None:
    """Multiple choice, rolling and generation: hf, lmhead, and local-completions on our server."""
    assert_backends_agree(open_model(folder), run(hf(folder)), 512)


@pytest.mark.parametrize(("arch", "quantization"), [("llama", "Q8_0"), ("qwen2", "F16")])
def test_three_backends_agree_on_a_gguf_file(arch: str, quantization: str, tmp_path: Path) -> None:
    """Two more GGUF models than smollm2, quantized and not."""
    file = tmp_path / "model.gguf"
    gguf_files.write(file, arch=arch, quantization=quantization, context=512)
    theirs = run(hf(tmp_path, gguf_file=file.name, dtype="float32"))
    assert_backends_agree(open_model(file), theirs, 512)


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_texts_longer_than_the_context(folder: Path, batch_size: Any) -> None:
    """Contexts are cut on the left, rolling windows cover every token once."""
    theirs = run(hf(folder, max_length=64))
    assert_same(run(LMHeadLM(folder, max_length=64, batch_size=batch_size)), theirs)


@pytest.mark.skipif(bundled.find("smollm2") is None, reason="smollm2: lmhead models add smollm2")
def test_smollm2_agrees() -> None:
    """A trained model from a GGUF file, which the harness's `gguf` backend cannot evaluate."""
    file = bundled.find("smollm2")
    assert file is not None
    theirs = run(hf(file.parent, gguf_file=file.name, dtype="float32"), limit=3)
    assert theirs["results"]["lmhead_generation"]["exact_match,none"] > 0.5
    assert_backends_agree(open_model("smollm2"), theirs, 8192, limit=3)


# --- log-likelihoods ------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> LanguageModel:
    return tiny(tmp_path)


def test_only_the_continuations_go_through_the_head(model: LanguageModel) -> None:
    seen: list[int] = []
    model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    pairs = [("hello ab cab", " ab"), ("hello ab cab", " cab hello"), ("ab", " hello cab")]
    lm = LMHeadLM(model)
    with no_tensor_of(40, model.head.vocab_size):
        lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    assert sum(seen) == sum(len(lm._encode_pair(*pair)[1]) for pair in pairs)


def test_answers_of_one_token_share_a_row(model: LanguageModel) -> None:
    read: list[int] = []
    body: Any = model.body
    body.register_forward_pre_hook(lambda _, args: read.append(args[0].shape[0]))
    ids = [1, 262, 98, 99]
    pairs: Any = [(None, ids, [token]) for token in (97, 98, 99, 100)]
    found = LMHeadLM(model)._loglikelihood_tokens(pairs, disable_tqdm=True)
    assert read == [1]
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([ids]))[0][0, -1]
        truth = (hidden.double() @ model.head.weight.double().T).log_softmax(-1)
    for (value, greedy), token in zip(found, (97, 98, 99, 100), strict=True):
        assert value == pytest.approx(float(truth[token]), abs=1e-5)
        assert greedy == (int(truth.argmax()) == token)


def test_of_equal_logits_the_lowest_id_is_greedy(model: LanguageModel) -> None:
    """As torch's argmax, with which the harness decides."""
    ids = [1, 262, 98]
    with torch.no_grad():
        best = int(model.head(model.hidden(torch.tensor([ids]))[0][0, -1]).argmax())
        other = 5 if best > 5 else best + 7
        model.head.weight[other] = model.head.weight[best]
    answers = dict(zip((best, other), score_batch(model, [ids], [[[best], [other]]]), strict=True))
    assert answers[best][0] == answers[other][0]
    assert answers[min(best, other)][1]
    assert not answers[max(best, other)][1]


def test_an_automatic_batch_keeps_the_bound(model: LanguageModel) -> None:
    cost = bytes_per_token(model)
    lm = LMHeadLM(model, max_bytes=40 * cost)
    rows = [tuple(range(length)) for length in (30, 20, 10, 10, 10, 10, 5, 5)]
    batches = list(lm._batches(rows))
    assert [row for batch in batches for row in batch] == rows
    assert [len(batch) for batch in batches] == [1, 2, 4, 1]
    assert [len(batch) for batch in LMHeadLM(model, batch_size=3)._batches(rows)] == [3, 3, 2]


def test_wrong_arguments(model: LanguageModel) -> None:
    for options, message in (
        ({"batch_size": 0}, "batch_size"),
        ({"max_length": 65}, "max_length"),
        ({"max_bytes": 0}, "max_bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            LMHeadLM(model, **options)  # type: ignore[arg-type]


# --- chat -----------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def test_chat_templates_agree(tmp_path: Path) -> None:
    write_folder(tmp_path, "llama", max_position_embeddings=512)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    ours, theirs = LMHeadLM(tmp_path), hf(tmp_path)
    assert ours.chat_template(True) == theirs.chat_template(True) == TEMPLATE
    question = {"role": "user", "content": "what a thing"}
    begun = {"role": "assistant", "content": "It is"}
    for messages, prompt in (([question], True), ([question, begun], False)):
        found = ours.apply_chat_template(messages, prompt)
        assert found == theirs.apply_chat_template(messages, prompt)
        assert ours.tok_encode(found) == theirs.tok_encode(found)
    options: Any = {"apply_chat_template": True, "system_instruction": "Be brief.", "limit": 4}
    names = ["lmhead_choice", "lmhead_generation"]
    assert_same(run(ours, names, **options), run(theirs, names, **options))


def test_a_model_without_a_template(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        LMHeadLM(model).apply_chat_template([{"role": "user", "content": "a"}])


# --- cache, processes, commands -------------------------------------------------------------------


class FailingBody(torch.nn.Module):
    """A body that counts its calls, and fails at one of them."""

    def __init__(self, body: Any, fails_at: int) -> None:
        super().__init__()
        self.body, self.calls, self.fails_at = body, 0, fails_at

    def forward(self, *args: Any) -> Any:
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        return self.body(*args)


def test_a_stopped_run_continues(model: LanguageModel, tmp_path: Path) -> None:
    from dataclasses import replace

    cache = str(tmp_path / "cache" / "answers")
    want = run(LMHeadLM(model, batch_size=4), NAMES[:1])
    calls = []
    for fails_at in (4, 0, 0):
        body = FailingBody(model.body, fails_at)
        lm = LMHeadLM(replace(model, body=body), batch_size=4)
        if fails_at:
            with pytest.raises(KeyboardInterrupt):
                run(lm, NAMES[:1], use_cache=cache)
        else:
            assert metrics(run(lm, NAMES[:1], use_cache=cache)) == metrics(want)
        calls.append(body.calls)
    assert calls[0] == 4
    assert 0 < calls[1] < 40
    assert calls[2] == 0, "everything is in the cache"
    first = FailingBody(model.body, 0)
    run(LMHeadLM(replace(model, body=first), batch_size=4), NAMES[:1])
    assert calls[1] <= first.calls - 3


def test_the_cache_belongs_to_one_model(tmp_path: Path) -> None:
    a, b = write_folder(tmp_path / "a", "llama"), write_folder(tmp_path / "b", "llama")
    names = [fingerprint(open_model(p), str(p), LMHeadLM(p)) for p in (a, b, a)]
    assert names[0] == names[2] != names[1]
    os.utime(a / "model.safetensors", ns=(1, 1))
    assert fingerprint(open_model(a), str(a), LMHeadLM(a)) != names[0]


def environment() -> dict[str, str]:
    more = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHON_EXEC": preloaded_python()}
    return {**os.environ, **more}


def test_torchrun(tmp_path: Path) -> None:
    """Two processes give the result of one."""
    folder = write_folder(tmp_path / "model", "llama", max_position_embeddings=512)
    want = metrics(run(LMHeadLM(folder)))
    out = tmp_path / "out.json"
    subprocess.run(
        [preloaded_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "lmhead", "eval", str(folder), "--tasks", str(TASKS), "--output", str(out)],
        check=True, timeout=300, env=environment(), capture_output=True,
    )  # fmt: skip
    found = metrics(json.loads(out.read_text()))
    assert {key: found[key] for key in want} == pytest.approx(want, rel=1e-6)


def test_the_harness_own_command(tmp_path: Path) -> None:
    """`python -m lmhead.integrations.lm_eval` is lm_eval, with lmhead among its models."""
    folder = write_folder(tmp_path / "model", "llama", max_position_embeddings=512)
    # As `-m`, but for the thousands of files beside the harness's manager, which take 8 s to read.
    code = (
        "import runpy, lm_eval.tasks.manager as manager\n"
        f"manager.__file__ = {str(TASKS / 'manager.py')!r}\n"
        "runpy.run_module('lmhead.integrations.lm_eval', run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run(
        [preloaded_python(), "-c", code, "run", "--model", "lmhead",
         "--model_args", f"path={folder}", "--include_path", str(TASKS), "--tasks",
         "lmhead_choice", "--limit", "3"],
        check=True, timeout=300, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert "|lmhead_choice|" in done.stdout.replace(" ", "")


def test_the_command(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "llama", max_position_embeddings=512)
    out = tmp_path / "out.json"
    arguments = ["eval", str(folder), "--tasks", f"{TASKS}/choice.yaml,{TASKS}/rolling.yaml"]
    arguments += ["--limit", "4", "--output", str(out), "--samples"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "|lmhead_choice" in done.stdout
    assert "|lmhead_rolling" in done.stdout
    want = run(LMHeadLM(folder), [NAMES[0], NAMES[2]], limit=4)
    found = json.loads(out.read_text())
    ours = {key: value for key, value in metrics(found).items() if "stderr" not in key[1]}
    assert ours == pytest.approx(metrics(want))
    assert [a for _, a, _ in answers(found)] == pytest.approx([a for _, a, _ in answers(want)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "no_such_task"], "there is no task 'no_such_task'"),
        (["--tasks", "missing.yaml"], "cannot be read"),
        (["--tasks", ","], "at least one task"),
        (["--tasks", "x", "--samples"], "--samples needs --output"),
        (["--tasks", "x", "--batch-size", "0"], "--batch-size"),
        (["--tasks", "x", "--chat"], "--chat needs a chat template"),
        (["--tasks", "x", "--output", "/no/such/folder/out.json"], "must exist"),
        ([], "--tasks"),
    ],
)
def test_a_wrong_call(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny_models import write_model

    # Reading the thousands of files beside the harness's manager takes 8 s.
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(TASKS / "manager.py"))
    done = CliRunner().invoke(main, ["eval", str(write_model(tmp_path)), *arguments])
    assert done.exit_code == 2, done.output
    assert message in done.output
