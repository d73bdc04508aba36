"""Request checks: hosts, origins, methods, types, sizes, the key; headers of every response."""

from pathlib import Path
from typing import Any

import pytest

from lmhead.server import Limits, create_api_app, serve
from lmhead.server.launch import own_names
from server.serve_tiny import HOST, ask, make_app

OWN = f"http://{HOST}"
READ = ("/api/models", "/v1/models", "/tokenizer_info", "/health", "/metrics")
POSTED = ("/api/next", "/v1/completions", "/v1/chat/completions", "/tokenize")


@pytest.fixture(params=["page", "api"])
def app(page: Path, request: pytest.FixtureRequest) -> Any:
    """Both applications: the page with all routes, and the OpenAI-compatible API alone."""
    limits = Limits(body_bytes=100)
    if request.param == "page":
        return make_app(page, models={}, limits=limits)
    return create_api_app({}, hosts={HOST}, limits=limits)


@pytest.fixture
def page_app(page: Path) -> Any:
    return make_app(page, models={}, limits=Limits(body_bytes=100))


def post(app: Any, **headers: str) -> int:
    """The status of a POST to every route, which must be one."""
    given = {"content-type": "application/json"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    body = b'{"model": "none"}'
    statuses = {ask(app, "POST", path, content=body, headers=given).status_code for path in POSTED}
    assert len(statuses) == 1, statuses
    return statuses.pop()


def test_the_page_is_sent(page_app: Any) -> None:
    app = page_app
    answer = ask(app, "GET", "/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    script = ask(app, "GET", "/assets/a.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert "immutable" in script.headers["cache-control"]
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/", "/assets/a.js", "/nothing", "/api/next", *READ, *POSTED])
def test_every_answer_has_the_policy_and_none_lets_others_read(app: Any, path: str) -> None:
    headers = ask(app, "GET", path).headers
    assert headers["content-security-policy"].startswith("default-src 'none'")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert not [name for name in headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1", "127.0.0.1:80", ""]
)
def test_a_foreign_host_is_refused(app: Any, host: str) -> None:
    for path in ("/", *READ):
        assert ask(app, "GET", path, headers={"host": host}).status_code == 421
    assert post(app, host=host) == 421


def test_two_hosts_are_refused(app: Any) -> None:
    assert ask(app, "GET", "/", headers=[("host", HOST), ("host", HOST)]).status_code == 421


@pytest.mark.parametrize("origin", ["http://evil.example", "null", f"https://{HOST}", OWN + "0"])
def test_a_foreign_origin_is_refused(app: Any, origin: str) -> None:
    assert post(app, origin=origin) == 403
    for path in READ:
        assert ask(app, "GET", path, headers={"origin": origin}).status_code == 403


def test_our_own_origin_and_none_are_let_in(app: Any) -> None:
    assert post(app, origin=OWN) == 404  # no such model: it got as far as that
    assert post(app) == 404


def test_a_link_from_elsewhere_opens_the_page_but_no_answer(page_app: Any) -> None:
    app = page_app
    from_elsewhere = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert ask(app, "GET", "/", headers=from_elsewhere).status_code == 200
    for path in ("/api/models", "/v1/models"):
        assert ask(app, "GET", path, headers=from_elsewhere).status_code == 403
    embedded = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
    assert ask(app, "GET", "/", headers=embedded).status_code == 403
    assert post(app, sec_fetch_site="same-site") == 403


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_only_json_is_taken(app: Any, kind: str) -> None:
    assert post(app, content_type=kind) == 415


def test_json_with_a_charset_is_taken(app: Any) -> None:
    assert post(app, content_type="Application/JSON; charset=utf-8") == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE", "PATCH"])
def test_other_methods_are_refused(app: Any, method: str) -> None:
    assert ask(app, method, "/").status_code == 405


def test_a_large_body_is_refused_whether_it_says_its_size_or_not(app: Any) -> None:
    json_type = {"content-type": "application/json"}

    async def pieces() -> Any:
        for _ in range(11):
            yield b" " * 10

    path = "/v1/completions"
    assert ask(app, "POST", path, content=b" " * 101, headers=json_type).status_code == 413
    assert ask(app, "POST", path, content=pieces(), headers=json_type).status_code == 413
    assert ask(app, "POST", path, content=b" " * 100, headers=json_type).status_code == 400


@pytest.mark.parametrize("length", [b"-1", b"1e3", b"x", "\u0663".encode()])
def test_a_strange_length_is_refused(app: Any, length: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    assert ask(app, "POST", "/v1/completions", content=b"{}", headers=headers).status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/assets/../../secret.txt",
        "/%2e%2e/secret.txt",
        "//etc/passwd",
        "/assets/..%5c..%5csecret.txt",
        "/index.html%00",
        "/secret.txt",
    ],
)
def test_no_address_reaches_a_file_outside(app: Any, path: str) -> None:
    answer = ask(app, "GET", path)
    assert answer.status_code == 404
    assert "secret" not in answer.text


def test_a_key_is_asked_for_everywhere(page: Path) -> None:
    app = make_app(page, models={}, key="open sesame")
    for path in ("/", "/assets/a.js", *READ):
        assert ask(app, "GET", path).status_code == 401
    wrong = {"authorization": "Bearer open sesam"}
    assert ask(app, "GET", "/", headers=wrong).status_code == 401
    assert ask(app, "GET", "/?key=wrong").status_code == 401
    right = {"authorization": "Bearer open sesame"}
    assert ask(app, "GET", "/api/models", headers=right).status_code == 200


def test_the_address_with_the_key_sets_a_cookie_that_scripts_cannot_read(page: Path) -> None:
    app = make_app(page, models={}, key="open")
    answer = ask(app, "GET", "/?key=open&lang=zh")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?lang=zh")
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    shown = {"cookie": answer.headers["set-cookie"].split(";")[0]}
    assert ask(app, "GET", "/api/models", headers=shown).status_code == 200


def test_a_host_that_others_reach_needs_a_key() -> None:
    with pytest.raises(
        ValueError, match=r"host must be a loopback address .* unless a key is given"
    ):
        serve({}, host="0.0.0.0")


def test_a_port_that_is_taken_is_named() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"127.0.0.1:{port}: Address already in use"):
            serve({}, port=port)


def test_own_names_hold_the_port() -> None:
    assert own_names("127.0.0.1", 9) == {"127.0.0.1:9", "localhost:9"}
    assert own_names("::1", 9) == {"[::1]:9", "localhost:9"}


def test_the_log_has_neither_prompt_nor_key(page: Path) -> None:
    lines: list[str] = []
    app = make_app(page, key="secret-key", log=lambda record: lines.append(str(record)))
    ask(app, "GET", "/?key=secret-key")
    headers = {"authorization": "Bearer secret-key"}
    asked = {"model": "tiny", "prompt": "secret prompt"}
    ask(app, "POST", "/api/next", json=asked, headers=headers)
    ask(app, "POST", "/api/next", json=asked)
    ask(app, "GET", "/a%0ab", headers=headers)
    assert [line.split()[1:4] for line in lines] == [
        ["GET", "/", "303"],
        ["POST", "/api/next", "200"],
        ["POST", "/api/next", "401"],
        ["GET", "/a\\nb", "404"],
    ]
    assert "secret" not in "".join(lines)
