"""`lmhead serve`: the command starts the server, prints its address, and ends on SIGINT."""

import signal
import subprocess

import pytest
from openai import OpenAI
from preloaded_python import preloaded_python

from cli.run_command import run
from lmhead.models import open_model
from lmhead.sampling import generate


def test_the_server_answers_and_ends(model: str) -> None:
    command = [preloaded_python(), "-m", "lmhead", "serve", model, model, "--port", "0", "--log"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("OpenAI-compatible API at http://127.0.0.1:")
        try:
            with OpenAI(base_url=line.split()[-1], api_key="none") as client:
                assert [entry.id for entry in client.models.list()] == ["tiny", "tiny (2)"]
                found = client.completions.create(
                    model="tiny", prompt="hello", max_tokens=5, temperature=0
                )
            want = generate(open_model(model), "hello", max_new_tokens=5).text
            assert found.choices[0].text == want
        finally:
            process.send_signal(signal.SIGINT)
        errors = process.stderr.read().splitlines()
    assert process.returncode == 130
    assert errors[0] == "Press Ctrl-C to stop."
    assert [line.split()[1:4] for line in errors[1:3]] == [
        ["GET", "/v1/models", "200"],
        ["POST", "/v1/completions", "200"],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "unless a key is given"),
        (["--host", "192.0.2.1", "--key", "k"], "192.0.2.1"),
    ],
)
def test_mistakes(options: list[str], message: str, model: str) -> None:
    assert message in run("serve", model, *options, code=1).stderr
