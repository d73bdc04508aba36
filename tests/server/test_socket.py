"""Over a real socket: slow clients, clients that vanish, many at once, and what is no HTTP."""

import asyncio
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from llama2c_files import tiny_model

from lmhead.models import LanguageModel
from lmhead.server import Limits
from lmhead.server.launch import bind
from server.serve_tiny import finish, running, write_page

QUESTION = {"model": "slow", "ids": [5, 6]}
# The page's API, and the OpenAI-compatible one on the same worker.
ASKED = pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/api/next", QUESTION),
        ("/v1/completions", {"model": "slow", "prompt": [5, 6], "max_tokens": 1}),
    ],
    ids=["page", "v1"],
)


class SlowBody:
    """The body of a model, after a wait that a test can end."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.go, self.calls = model, threading.Event(), 0

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        self.go.wait(5)
        return self.model.body(*args)


@pytest.fixture
def slow(tmp_path: Path) -> SlowBody:
    return SlowBody(tiny_model(tmp_path))


@pytest.fixture
def port(slow: SlowBody, tmp_path: Path) -> Iterator[int]:
    model = LanguageModel(slow, slow.model.head, tokenizer=slow.model.tokenizer, max_length=64)
    limits = Limits(waiting=3, seconds=20.0)
    with running(write_page(tmp_path / "page"), models={"slow": model}, limits=limits) as found:
        yield found
        slow.go.set()


def head(port: int, length: int, path: str = "/api/next") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def send_on(sock: socket.socket) -> None:
    """Until the other side has had enough."""
    while True:
        sock.sendall(b" " * 4096)
        time.sleep(0.01)


def status(sock: socket.socket) -> int:
    return int(sock.recv(100).split()[1])


@ASKED
def test_a_body_that_does_not_come_is_not_waited_for(
    tmp_path: Path, path: str, question: Any
) -> None:
    page, limits = write_page(tmp_path / "page"), Limits(body_seconds=0.1)
    with (
        running(page, models={}, limits=limits) as port,
        socket.create_connection(("127.0.0.1", port), timeout=5) as sock,
    ):
        sock.sendall(head(port, 500, path) + json.dumps(question).encode())
        assert status(sock) == 408


@ASKED
def test_who_sends_too_much_can_read_why(port: int, path: str, question: Any) -> None:  # noqa: ARG001
    """The rest is thrown away: a connection closed over it would be reset, the answer lost."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(head(port, 32 << 20, path) + b" " * (32 << 20))
        assert status(sock) == 413


def test_who_goes_on_sending_is_not_listened_to_for_ever(tmp_path: Path) -> None:
    page, limits = write_page(tmp_path / "page"), Limits(linger_seconds=0.1)
    with (
        running(page, models={}, limits=limits) as port,
        socket.create_connection(("127.0.0.1", port), timeout=5) as sock,
    ):
        sock.sendall(head(port, 1 << 40))
        assert status(sock) == 413
        with pytest.raises(ConnectionError):
            send_on(sock)


def test_a_client_that_reads_slowly_holds_up_no_one(port: int, slow: SlowBody) -> None:
    """It stops reading a long stream; others are answered meanwhile, and its own is complete."""
    slow.go.set()
    asked = {"model": "slow", "prompt": [5, 6], "max_tokens": 30, "stream": True, "logprobs": 20}
    body = json.dumps({**asked, "n": 2, "ignore_eos": True}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", port))
        sock.sendall(head(port, len(body), "/v1/completions") + body)
        read = sock.recv(500)
        assert read.split()[1] == b"200"
        for _ in range(3):
            answer = httpx.post(f"http://127.0.0.1:{port}/api/next", json=QUESTION, timeout=10)
            assert answer.status_code == 200
        while b"[DONE]" not in read[-100:]:
            part = sock.recv(1 << 16)
            assert part
            read += part
    assert read.count(b'"finish_reason": "length"') == 2


def test_answers_are_sent_at_once() -> None:
    """Held back until the header is acknowledged, a body would come 40 ms late."""
    at_once: list[int] = []

    async def main() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            at_once.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = bind("127.0.0.1", 0)
        async with await asyncio.start_server(answer, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            await reader.read()
            writer.close()

    finish(main())
    assert at_once == [1]


def test_what_is_no_http_gets_400(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        assert status(sock) == 400


@ASKED
def test_too_many_get_429_and_the_rest_are_answered(
    port: int, slow: SlowBody, path: str, question: Any
) -> None:
    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            asked = [asyncio.create_task(client.post(path, json=question)) for _ in range(12)]
            while sum(task.done() for task in asked) < 9:
                await asyncio.sleep(0.01)
            slow.go.set()
            return list(await asyncio.gather(*asked))

    answers = finish(main())
    assert Counter(answer.status_code for answer in answers) == {200: 3, 429: 9}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1


@ASKED
def test_work_is_not_begun_for_clients_that_have_left(
    port: int, slow: SlowBody, path: str, question: Any
) -> None:
    body = json.dumps(question).encode()
    socks = []
    for _ in range(3):
        sock = socket.create_connection(("127.0.0.1", port), timeout=5)
        sock.sendall(head(port, len(body), path) + body)
        socks.append(sock)
    while slow.calls == 0:
        time.sleep(0.005)
    for sock in socks[1:]:
        sock.close()
    time.sleep(0.1)
    slow.go.set()
    with socks[0]:
        assert status(socks[0]) == 200
    # Their places are free again, and the model was asked once for them all.
    answer = httpx.post(f"http://127.0.0.1:{port}{path}", json=question, timeout=5)
    assert answer.status_code == 200
    assert slow.calls == 2


async def answered(reader: asyncio.StreamReader) -> int:
    """Read one answer; its status."""
    text = await reader.readuntil(b"\r\n\r\n")
    length = int(text.lower().split(b"content-length:")[1].split()[0])
    await reader.readexactly(length)
    return int(text.split()[1])


def test_two_hundred_clients_at_once(port: int, slow: SlowBody) -> None:
    slow.go.set()
    seen: Counter[int] = Counter()
    body = json.dumps(QUESTION).encode()

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        path = ("/", "/assets/a.js", "/api/models")[number % 3]
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        seen[await answered(reader)] += 1
        writer.write(head(port, len(body)) + body)
        seen[await answered(reader)] += 1
        writer.close()
        await writer.wait_closed()

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(*(client(number) for number in range(200))), 30)

    finish(main())
    assert set(seen) == {200, 429}
    assert seen[200] >= 201
    assert httpx.get(f"http://127.0.0.1:{port}/api/models").status_code == 200


def test_a_header_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    page, limits = write_page(tmp_path / "page"), Limits(header_seconds=0.2)
    with running(page, models={}, limits=limits) as port:
        address = ("127.0.0.1", port)
        request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
        for before, start in ((b"", b""), (b"", request[:20]), (request, request[:20])):
            with socket.create_connection(address, timeout=5) as sock:
                sock.sendall(before)
                if before:
                    assert status(sock) == 200
                sock.sendall(start)
                began = time.monotonic()
                with suppress(ConnectionResetError):
                    while sock.recv(1 << 16):
                        pass
                assert 0.1 < time.monotonic() - began < 3


def test_a_slow_answer_outlives_the_deadline_of_headers(slow: SlowBody, tmp_path: Path) -> None:
    model = LanguageModel(slow, slow.model.head, tokenizer=slow.model.tokenizer, max_length=64)
    limits = Limits(header_seconds=0.1)
    with running(write_page(tmp_path / "page"), models={"slow": model}, limits=limits) as port:
        threading.Timer(0.5, slow.go.set).start()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
            for _ in range(2):  # the second one on the same connection, after a pause
                assert client.post("/api/next", json=QUESTION).status_code == 200
                time.sleep(0.3)


def test_connections_without_a_request_shut_no_one_out(tmp_path: Path) -> None:
    limits = Limits(connections=40, incomplete=20)
    with (
        running(write_page(tmp_path / "page"), models={}, limits=limits) as port,
        ExitStack() as opened,
    ):
        for _ in range(60):
            opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        time.sleep(1.1)
        opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
        time.sleep(0.1)
        assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 200


def test_too_many_header_lines(port: int) -> None:
    url = f"http://127.0.0.1:{port}/api/models"
    for count, status_code in ((90, 200), (101, 431)):
        headers = [(f"x-{i}", "1") for i in range(count)]
        assert httpx.get(url, headers=headers).status_code == status_code
