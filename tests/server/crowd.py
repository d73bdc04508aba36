"""Many clients at once, well-behaved and not: what each sends, and which response it must get.

In:  the port of a server, how many clients, how long.
Out: per kind of client how often it got which status, and responses that no client should get.
"""

import asyncio
import itertools
import json
import random
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from server.serve_tiny import finish

BUSY = frozenset({200, 429})


@dataclass
class Crowd:
    """Clients of every kind in turn, each a new connection, until the time is up."""

    port: int
    model: str
    end: float = 0.0
    seen: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def run(self, clients: int, seconds: float) -> None:
        """Run `clients` at once for `seconds`."""
        self.end = time.monotonic() + seconds
        finish(self._all(clients))

    async def _all(self, clients: int) -> None:
        await asyncio.gather(*(self._client(number) for number in range(clients)))

    async def _client(self, number: int) -> None:
        chance = random.Random(number)
        for turn in itertools.count(number):
            if time.monotonic() > self.end:
                return
            kind = KINDS[turn % len(KINDS)]
            began = time.monotonic()
            try:
                status = await asyncio.wait_for(kind.act(self, chance), 60)
            except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
                self.wrong[f"{kind.name}: {error!r}"] += 1
                continue
            self.seen[kind.name, status] += 1
            self.slowest[kind.name] = max(self.slowest[kind.name], time.monotonic() - began)
            if status not in kind.right:
                self.wrong[f"{kind.name}: {status}"] += 1

    def head(self, first: str, *more: str, host: str | None = None) -> bytes:
        lines = [f"{first} HTTP/1.1", f"Host: {host or f'127.0.0.1:{self.port}'}", *more]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def ask(self, *parts: bytes, pause: float = 0.0) -> int:
        """Send the parts, and read the status; 0 if the connection ends without one."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)
            return await _answer(reader)
        except ConnectionError:
            return await _answer(reader)  # it may have sent the reason before it closed
        finally:
            writer.close()

    async def post(self, path: str, body: bytes, *more: str, pause: float = 0.0) -> int:
        lines = ("Content-Type: application/json", f"Content-Length: {len(body)}", *more)
        half = len(body) // 2 if pause else 0
        head = self.head(f"POST {path}", *lines)
        return await self.ask(head + body[:half], body[half:], pause=pause)

    def completion(self, **more: Any) -> bytes:
        return json.dumps({"model": self.model, "prompt": [5, 6], "max_tokens": 3, **more}).encode()

    def question(self, tokens: int = 3) -> bytes:
        return json.dumps({"model": self.model, "ids": [5] * tokens}).encode()


async def _answer(reader: asyncio.StreamReader) -> int:
    text = await reader.readuntil(b"\r\n\r\n")
    if b"content-length:" in text.lower():
        length = int(text.lower().split(b"content-length:")[1].split()[0])
        await reader.readexactly(length)
    return int(text.split()[1])


async def _vanish(crowd: Crowd, chance: random.Random) -> int:
    """Ask for much and leave at once, now and then without a token."""
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", crowd.port))
    path, body = chance.choice(
        [
            (
                "/api/paths",
                json.dumps({"model": crowd.model, "ids": [5] * 60, "tokens": 60}).encode(),
            ),
            ("/v1/completions", crowd.completion(n=4, max_tokens=100)),
        ]
    )
    head = crowd.head(
        f"POST {path}", "Content-Type: application/json", f"Content-Length: {len(body)}"
    )
    sent = (head + body)[: chance.choice([len(head) // 2, len(head), len(head + body)])]
    await asyncio.get_running_loop().sock_sendall(sock, sent)
    await asyncio.sleep(chance.random() / 20)
    if chance.random() < 0.5:  # a reset instead of an end
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    return 0


async def _stall(crowd: Crowd, chance: random.Random) -> int:
    """A body that does not come: waited for as long as the server waits, or our time lasts."""
    path = chance.choice(["/api/next", "/v1/chat/completions"])
    head = crowd.head(f"POST {path}", "Content-Type: application/json", "Content-Length: 50")
    reader, writer = await asyncio.open_connection("127.0.0.1", crowd.port)
    try:
        writer.write(head + b"{")
        return await asyncio.wait_for(_answer(reader), max(0.1, crowd.end - time.monotonic()))
    except TimeoutError:
        return 0
    finally:
        writer.close()


async def _endless(crowd: Crowd, chance: random.Random) -> int:
    """A body in chunks that never says how long it is; 5 MiB of it, more than is allowed."""
    path = chance.choice(["/api/next", "/v1/completions"])
    head = crowd.head(
        f"POST {path}", "Content-Type: application/json", "Transfer-Encoding: chunked"
    )
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    return await crowd.ask(head, *[chunk] * 5)


async def _stream(crowd: Crowd, chance: random.Random, *, leave: bool = False) -> int:
    """A streamed completion, read to its end; or left after its first event."""
    asked = {"max_tokens": 100 if leave else chance.randint(1, 8), "stream": True}
    body = crowd.completion(**asked)
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    reader, writer = await asyncio.open_connection("127.0.0.1", crowd.port)
    try:
        writer.write(crowd.head("POST /v1/completions", *lines) + body)
        status = int((await reader.readuntil(b"\r\n\r\n")).split()[1])
        if status == 200:
            await reader.readuntil(b"data: " if leave else b"data: [DONE]\n\n")
        return status
    finally:
        writer.close()


Act = Callable[[Crowd, random.Random], Awaitable[int]]


@dataclass(frozen=True)
class Kind:
    """What a client does, and the statuses that it may get; 0 for none."""

    name: str
    right: frozenset[int]
    act: Act


def _kind(name: str, right: set[int] | frozenset[int], act: Act) -> Kind:
    return Kind(name, frozenset(right), act)


_COMPLETIONS = "/v1/completions"
KINDS = (
    _kind("page", {200}, lambda c, _: c.ask(c.head("GET /"))),
    _kind("next", BUSY, lambda c, r: c.post("/api/next", c.question(r.randint(1, 60)))),
    _kind("models", {200}, lambda c, _: c.ask(c.head("GET /api/models"))),
    _kind("paths", BUSY, lambda c, _: c.post("/api/paths", c.question())),
    _kind("vocabulary", BUSY, lambda c, _: c.ask(c.head(f"GET /api/vocabulary?model={c.model}"))),
    _kind("no JSON", {400}, lambda c, r: c.post("/api/next", r.randbytes(40))),
    _kind("wrong field", {400}, lambda c, _: c.post("/api/next", b'{"model": "tiny", "x": 1}')),
    _kind("no model", {404}, lambda c, _: c.post("/api/next", b'{"model": "../etc"}')),
    _kind("no type", {415}, lambda c, _: c.ask(c.head("POST /api/next", "Content-Length: 0"))),
    _kind(
        "too large",
        {413},
        lambda c, _: c.ask(
            c.head("POST /api/next", "Content-Type: application/json", "Content-Length: 99999999")
        ),
    ),
    _kind("endless", {413}, _endless),
    _kind("foreign host", {421}, lambda c, _: c.ask(c.head("GET /", host="evil.example"))),
    _kind(
        "foreign origin",
        {403},
        lambda c, _: c.post("/api/next", c.question(), "Origin: http://evil.example"),
    ),
    _kind("no HTTP", {400}, lambda c, r: c.ask(b"\x16\x03" + r.randbytes(20) + b"\r\n\r\n")),
    _kind("slow", BUSY, lambda c, _: c.post("/api/next", c.question(), pause=0.3)),
    _kind("completion", BUSY, lambda c, _: c.post(_COMPLETIONS, c.completion())),
    _kind(
        "echo",
        BUSY,
        lambda c, _: c.post(_COMPLETIONS, c.completion(echo=True, logprobs=3, max_tokens=0)),
    ),
    _kind(
        "guided",
        BUSY,
        lambda c, _: c.post(_COMPLETIONS, c.completion(guided_regex="[a-c]{4}", n=2)),
    ),
    _kind("stream", BUSY, _stream),
    _kind("stream left", BUSY, lambda c, r: _stream(c, r, leave=True)),
    _kind("slow completion", BUSY, lambda c, _: c.post(_COMPLETIONS, c.completion(), pause=0.3)),
    _kind("tokenize", BUSY, lambda c, _: c.post("/tokenize", b'{"prompt": "In the"}')),
    _kind("/v1/models", {200}, lambda c, _: c.ask(c.head("GET /v1/models"))),
    _kind("metrics", {200}, lambda c, _: c.ask(c.head("GET /metrics"))),
    _kind(
        "wrong completion",
        {400, 429},
        lambda c, r: c.post(_COMPLETIONS, c.completion(n=r.random())),
    ),
    _kind("no chat", {400, 429}, lambda c, _: c.post("/v1/chat/completions", b'{"messages": []}')),
    _kind("no JSON to /v1", {400}, lambda c, r: c.post(_COMPLETIONS, r.randbytes(40))),
    _kind("no /v1 model", {404}, lambda c, _: c.post(_COMPLETIONS, b'{"model": "../etc"}')),
    _kind("wrong method", {405}, lambda c, _: c.ask(c.head(f"GET {_COMPLETIONS}"))),
    _kind(
        "rebound name",
        {421},
        lambda c, _: c.ask(c.head("GET /v1/models", host=f"evil.example:{c.port}")),
    ),
    _kind(
        "other page",
        {403},
        lambda c, _: c.post(_COMPLETIONS, c.completion(), "Sec-Fetch-Site: cross-site"),
    ),
    _kind("vanish", {0}, _vanish),
    _kind("vanish again", {0}, _vanish),
    _kind("stall", {0, 408}, _stall),
)
