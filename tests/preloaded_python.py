"""A `python` that starts at once: processes are forked from one that has imported torch and lmhead.

    command = preloaded_python()    # in place of sys.executable
    subprocess.run([command, "-m", "lmhead", "next", "tiny", "I love"])

takes the arguments `-u`, `-c CODE`, `-m MODULE` and `FILE`, and behaves as the interpreter does:
environment, folder, standard streams (closed ones too), signals and exit code. With other options,
or if a variable that is read at import differs, a fresh interpreter runs in its place.

Three processes: the server, one per process of pytest, imports and forks; the fork runs the
program; the client, which the caller has started, hands its streams to the server, passes signals
on, and ends as the fork ends. If the client is killed, so is the fork. Not for tests of what is
imported, how long that takes, or how much memory it needs, since a fork has all that already.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
from functools import cache

TYPE_CHECKING = False  # the client starts without `typing`
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

# Variables that the interpreter, libraries or the package read when they are loaded.
READ_AT_IMPORT = (
    *("LMHEAD_", "OMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "LANG", "LC_"),
    *("PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONWARNINGS"),
)
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@cache
def preloaded_python() -> str:
    """Return an executable to use in place of `sys.executable`; starts the server at first use."""
    import atexit
    import subprocess
    import tempfile
    from pathlib import Path

    if not hasattr(os, "fork"):
        return sys.executable
    folder = tempfile.TemporaryDirectory(prefix="preloaded-")
    address = f"{folder.name}/socket"
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        stdin=subprocess.PIPE,  # at its end, which is ours, the server ends
        stdout=subprocess.PIPE,
        cwd=folder.name,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        start_new_session=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    assert server.stdout.read(5) == b"ready"

    def end() -> None:
        with server:
            server.communicate()
        folder.cleanup()

    atexit.register(end)
    program = Path(folder.name, "python")
    program.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.append({str(Path(__file__).parent)!r})\n"
        f"from preloaded_python import run\nrun({address!r}, sys.argv[1:])\n"
    )
    program.chmod(0o700)
    return str(program)


# The client.


def run(address: str, arguments: list[str]) -> None:
    """Let the server run a program on this process's streams; end as it ends."""
    streams = [n for n in range(3) if _is_open(n)]
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "streams": streams,
        "ignored": [n for n in PASSED_ON if signal.getsignal(n) is signal.SIG_IGN],
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        text = json.dumps(request).encode()
        socket.send_fds(connection, [len(text).to_bytes(4, "big")], streams)
        for number in PASSED_ON:
            if number not in request["ignored"]:
                signal.signal(number, lambda n, _: connection.send(bytes([n])))
        connection.sendall(text)
        answer = connection.recv(16)
    if answer == b"fresh":
        os.execv(sys.executable, [sys.executable, *arguments])
    code = int(answer)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# The server.


def _preload() -> None:
    import gc

    sys.path.pop(0)  # this folder
    import torch.distributed.fsdp
    import torch.distributed.run
    import torch.distributed.tensor.parallel  # noqa: F401

    import lmhead.analysis
    import lmhead.cli
    import lmhead.server.launch
    import lmhead.train.training_loop

    for name in lmhead.__all__:
        getattr(lmhead, name)
    assert "huggingface_hub" not in sys.modules  # it reads HF_HUB_OFFLINE and others
    gc.collect()
    gc.freeze()


def serve(address: str) -> Callable[[], object]:
    """Fork for each request; return the program to run, in the fork."""
    import select

    _preload()
    own = _read_at_import(dict(os.environ))
    wake, woken = socket.socketpair()
    woken.setblocking(False)
    signal.set_wakeup_fd(woken.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[socket.socket, int] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(1, b"ready")
        while True:
            for ready in select.select([sys.stdin, wake, listener, *running], [], [])[0]:
                if ready is sys.stdin:  # the process that started this one has ended
                    for pid in running.values():
                        os.kill(pid, signal.SIGKILL)
                    os._exit(0)
                elif ready is wake:
                    wake.recv(1024)
                    _report_ended(running)
                elif ready is listener:
                    client = listener.accept()[0]
                    request, descriptors = _read_request(client)
                    program = _program(request.get("arguments", []))
                    if program is None or _read_at_import(request["environment"]) != own:
                        with client, contextlib.suppress(OSError):
                            client.sendall(b"fresh")
                    elif pid := os.fork():
                        running[client] = pid
                    else:
                        signal.set_wakeup_fd(-1)
                        for other in (wake, woken, listener, client, *running):
                            other.close()
                        _become(request, descriptors)
                        return program
                    for descriptor in descriptors:
                        os.close(descriptor)
                elif ready in running:
                    _pass_on(ready, running[ready])


def _read_at_import(environment: dict[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT)}


def _report_ended(running: dict[socket.socket, int]) -> None:
    for client, pid in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del running[client]
            with client, contextlib.suppress(OSError):  # it may have been killed
                client.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _pass_on(client: socket.socket, pid: int) -> None:
    """Send the client's signals to the fork; kill it if the client was killed."""
    try:
        numbers = client.recv(64)
    except ConnectionResetError:
        numbers = b""
    for number in numbers or (signal.SIGKILL,):
        os.kill(pid, number)


def _read_request(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the request, empty if the client ended before it was sent, and its streams."""
    size, descriptors, _, _ = socket.recv_fds(client, 4, 3)
    left, parts = int.from_bytes(size, "big"), []
    while left and (part := client.recv(left)):
        parts.append(part)
        left -= len(part)
    return json.loads(b"".join(parts)) if parts and not left else {}, descriptors


# The fork.


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Take the client's folder, environment and streams; forget the server's signal handlers."""
    import fcntl

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    # Above 2, so that no stream overwrites one that is still to be moved.
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 3) for descriptor in descriptors]
    for descriptor in {0, 1, 2, *descriptors}:
        os.close(descriptor)
    for stream, descriptor in zip(request["streams"], moved, strict=True):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    unbuffered = request["arguments"][:1] == ["-u"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    for stream, name in enumerate(("stdin", "stdout", "stderr")):
        file = _open_stream(stream, name, unbuffered) if stream in request["streams"] else None
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)


def _open_stream(descriptor: int, name: str, unbuffered: bool) -> io.TextIOWrapper:
    """Open a standard stream as the interpreter does when it starts."""
    old, mode = getattr(sys, name), "rb" if name == "stdin" else "wb"
    size = 0 if unbuffered and mode == "wb" else -1
    binary = open(descriptor, mode, size, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(
        binary,
        old.encoding,
        old.errors,
        line_buffering=not unbuffered and (name == "stderr" or binary.isatty()),
        write_through=unbuffered,
    )


def _program(arguments: list[str]) -> Callable[[], object] | None:
    """Return what runs these arguments of the interpreter; None if only a fresh one can."""
    if arguments[:1] == ["-u"]:
        arguments = arguments[1:]
    match arguments:
        case ["-c", code, *rest]:
            return lambda: _execute_code(code, ["-c", *rest])
        case ["-m", module, *rest]:
            return lambda: _execute_module(module, ["-m", *rest])
        case [file, *_] if not file.startswith("-"):
            return lambda: _execute_file(file, arguments)
    return None


def _execute_code(code: str, arguments: list[str]) -> None:
    _set_paths("")
    sys.argv = arguments
    exec(compile(code, "<string>", "exec"), vars(_new_main()))


def _execute_file(name: str, arguments: list[str]) -> None:
    _set_paths(os.path.dirname(os.path.realpath(name)))
    sys.argv = arguments
    main = _new_main()
    main.__file__ = name
    with open(name, encoding="utf-8") as file:
        code = compile(file.read(), name, "exec")
    exec(code, vars(main))


def _new_main() -> ModuleType:
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    return module


def _execute_module(name: str, arguments: list[str]) -> None:
    import runpy

    _set_paths(os.getcwd())
    sys.argv = arguments
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_paths(first: str) -> None:
    more = os.environ.get("PYTHONPATH", "")
    sys.path[:0] = [first, *(more.split(os.pathsep) if more else [])]


def _end(code: int) -> None:
    """End this process; what was imported is not taken apart, which would take 0.2 s."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        if file is not None:
            file.flush()
    os._exit(code)


if __name__ == "__main__":
    program = serve(sys.argv[1])
    try:
        program()
    except SystemExit as end:
        if not isinstance(end.code, int):
            raise  # the interpreter prints it
        _end(end.code)
    _end(0)
