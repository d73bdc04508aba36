"""A client that leaves in the middle of a text: the model stops between two layers."""

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from lmhead import LMHead
from lmhead.models import LanguageModel
from lmhead.server.worker import call_before, layers_of
from server.serve_tiny import running, write_page

LAYERS = 50


class Layer(nn.Module):
    """Waits a little, and counts."""

    def __init__(self, seen: list[float]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(time.monotonic())
        time.sleep(0.02)
        return x


class SlowLayers(nn.Module):
    """A body of many slow layers."""

    def __init__(self, seen: list[float]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(seen) for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor, cache: Any, mask: torch.Tensor) -> Any:  # noqa: ARG002
        x = torch.zeros(*ids.shape, 4)
        for block in self.blocks:
            x = block(x)
        return x, None


def slow_model(seen: list[float]) -> LanguageModel:
    return LanguageModel(SlowLayers(seen), LMHead(4, 10))


def test_a_model_stops_between_layers_when_its_client_leaves(tmp_path: Path) -> None:
    seen: list[float] = []
    body = json.dumps({"model": "slow", "ids": [1, 2]}).encode()
    with running(write_page(tmp_path / "page"), models={"slow": slow_model(seen)}) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(
                f"POST /api/next HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: {len(body)}"
                "\r\nContent-Type: application/json\r\n\r\n".encode()
                + body
            )
            while not seen:
                time.sleep(0.002)
        time.sleep(0.4)
        stopped = len(seen)
        assert stopped < LAYERS / 2
        time.sleep(0.1)
        assert len(seen) == stopped
        # The next one is answered in full.
        answer = httpx.post(
            f"http://127.0.0.1:{port}/api/next", json={"model": "slow", "ids": [1]}, timeout=10
        )
        assert answer.status_code == 200
        assert len(seen) == stopped + LAYERS


def test_outside_nothing_is_asked_and_no_hook_is_left() -> None:
    model = slow_model([])
    assert isinstance(model.body, SlowLayers)

    def refuse() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError), call_before(layers_of([model]), refuse):
        model.hidden(torch.tensor([[1]]))
    assert not any(block._forward_pre_hooks for block in model.body.blocks)
    model.hidden(torch.tensor([[1]]))


def test_a_body_that_is_no_module_is_left_alone() -> None:
    calls = threading.Event()

    def body(ids: torch.Tensor, *_: Any) -> Any:
        calls.set()
        return torch.zeros(*ids.shape, 4), None

    model = LanguageModel(body, LMHead(4, 10))
    with call_before(layers_of([model]), lambda: pytest.fail("there is no layer")):
        model.hidden(torch.tensor([[1]]))
    assert calls.is_set()
