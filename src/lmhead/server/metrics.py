"""Counters of a server, as Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from starlette.routing import Route

from lmhead.server.guard import RequestRecord


class Metrics:
    """Requests by path and status, their seconds, and token counts.

    Only `paths` are counted by name; others are "other", so that the number of lines is bounded.
    """

    def __init__(self) -> None:
        self.paths: frozenset[str] = frozenset()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds = 0.0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def recorder(
        self, routes: Iterable[Route], log: Callable[[RequestRecord], object] | None
    ) -> Callable[[RequestRecord], None]:
        """Return a function that counts requests, those to these routes by path, and logs them."""
        self.paths = frozenset(route.path for route in routes)

        def record(request: RequestRecord) -> None:
            self.add(request)
            if log is not None:
                log(request)

        return record

    def add(self, record: RequestRecord) -> None:
        """Count a request."""
        path = record.path if record.path in self.paths else "other"
        self._requests[path, record.status] += 1
        self._seconds += record.seconds

    def text(self, *, running: int) -> str:
        """Return the counters in Prometheus's text format."""
        lines = ["# TYPE lmhead_requests_total counter"]
        lines += [
            f'lmhead_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._requests.items())
        ]
        for name, kind, value in (
            ("lmhead_request_seconds_total", "counter", round(self._seconds, 6)),
            ("lmhead_prompt_tokens_total", "counter", self.prompt_tokens),
            ("lmhead_generated_tokens_total", "counter", self.generated_tokens),
            ("lmhead_requests_running", "gauge", running),
        ):
            lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
        return "\n".join(lines) + "\n"
