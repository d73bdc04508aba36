"""A forked, preloaded interpreter behaves as a fresh one does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preloaded_python import READ_AT_IMPORT, preloaded_python

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked")

REPORT = """
import os, signal, sys
print(sys.argv, sys.path[:3], os.getcwd(), __name__, __builtins__ is not None)
print(sorted(os.environ.items()))
print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGCHLD), sys.executable)
print([(f.encoding, f.errors, f.line_buffering, f.write_through) if f else f
       for f in (sys.stdin, sys.stdout, sys.stderr)], file=sys.__stdout__)
print(sorted(os.listdir("/proc/self/fd")) if os.path.exists("/proc") else "", file=sys.stderr)
print(sys.stdin and sys.stdin.read())
"""


def both(
    arguments: list[str], **options: object
) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Run with the preloaded interpreter and with a fresh one."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options = {"env": environment, "text": True, "timeout": 60, **options}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    found, expected = (
        subprocess.run([program, *arguments], **options)  # type: ignore[call-overload]
        for program in (preloaded_python(), sys.executable)
    )
    return found, expected


def same(arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    found, expected = both(arguments, **options)
    assert found.stdout == expected.stdout
    assert found.stderr == expected.stderr
    assert found.returncode == expected.returncode
    return found


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_arguments_environment_folder_and_streams(
    kind: str, unbuffered: bool, tmp_path: Path
) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    program = {"-c": ["-c", REPORT], "-m": ["-m", "report"], "file": ["report.py"]}[kind]
    environment = {k: v for k, v in os.environ.items() if k.startswith(READ_AT_IMPORT)}
    environment |= {"PYTHONPATH": f"{tmp_path}/a:{tmp_path}", "A": "é"}
    done = same(
        ["-u", *program, "x", "-y z"] if unbuffered else [*program, "x", "-y z"],
        cwd=tmp_path,
        env=environment,
        input="héllo\n",
    )
    assert "-y z" in done.stdout
    assert "héllo" in done.stdout


@pytest.mark.parametrize(
    ("code", "returned"),
    [
        ("pass", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('a message')", 1),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
        ("import atexit; atexit.register(print, 'at the end'); print('first')", 0),
        (
            "import threading, time\n"
            "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
            0,
        ),
        ("import sys; sys.stdout.write('no newline')", 0),
        ("import nothing_of_this_name", 1),
    ],
)
def test_exit_codes(code: str, returned: int) -> None:
    found, expected = both(["-c", code])
    assert found.returncode == expected.returncode == returned
    assert found.stdout == expected.stdout
    assert found.stderr.splitlines()[-1:] == expected.stderr.splitlines()[-1:]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_output_that_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        found, expected = both(["-c", "print('a')"], stdout=full)
    assert found.returncode == expected.returncode == 120
    assert found.stderr.splitlines()[-1] == expected.stderr.splitlines()[-1]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "streams = [file is None for file in (sys.stdin, sys.stdout, sys.stderr)]\n"
        "out = os.open('out', os.O_WRONLY | os.O_CREAT)\n"
        "os.write(out, repr((streams, out)).encode())"
    )
    written = set()
    for program in (preloaded_python(), sys.executable):
        command = f'"$0" -c "$1" {closed}'
        subprocess.run(["sh", "-c", command, program, code], cwd=tmp_path, check=True)
        written.add((tmp_path / "out").read_text())
        (tmp_path / "out").unlink()
    assert len(written) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_program(number: int) -> None:
    code = "import time; print('started', flush=True); time.sleep(60)"
    returned = []
    for program in (preloaded_python(), sys.executable):
        with subprocess.Popen(
            [program, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"
            process.send_signal(number)
            process.communicate(timeout=30)
            returned.append(process.returncode)
    assert returned == [-number, -number]


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_process_is_gone() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([preloaded_python(), "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        assert process.stdout.read() == b""  # the program, which held the other end, has ended
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while exists(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not exists(pid)


def loaded(*arguments: str, **environment: str) -> bool:
    """Whether torch was there from the start."""
    code = "import sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [preloaded_python(), *arguments, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return {"True\n": True, "False\n": False}[done.stdout]


def test_a_fresh_interpreter_where_a_fork_would_differ() -> None:
    assert loaded()
    assert loaded(NO_COLOR="1", TORCHELASTIC_RUN_ID="1")
    assert not loaded("-X", "faulthandler")
    assert not loaded(LMHEAD_NATIVE="off")
    assert not loaded(OMP_NUM_THREADS="3")


def test_threads_in_a_fork() -> None:
    """The server imported torch, but has run nothing in parallel: OpenMP works in its forks."""
    code = (
        "import torch\ntorch.set_num_threads(3)\n"
        "x = torch.ones(1000, 1000, requires_grad=True)\n"
        "((x @ x).exp() * 0).sum().backward()\n"
        "print(int((torch.ones(500, 500) @ torch.ones(500, 500)).sum()))"
    )
    done = subprocess.run(
        [preloaded_python(), "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "125000000\n"
