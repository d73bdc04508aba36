"""Bounds of one request, and of the queue."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of a server.

    Attributes:
        header_seconds: time for the header of a request to arrive.
        header_lines: number of header lines.
        header_bytes: size of a header.
        connections: open connections.
        incomplete: connections without a complete header; if there are more, those that are older
            than a second are closed.
        body_bytes: size of a request's body.
        body_seconds: time for a body to arrive, whatever its size.
        linger_seconds: time during which the rest of a refused body is read and discarded, so that
            the client can read the response.
        prompts: prompts, and choices of all prompts, of a completion request.
        prompt_tokens: length of a prompt; a model's own `max_length` may be smaller.
        text_tokens: length of a text to score.
        lens_tokens: length of a prompt for the logit lens.
        compare_tokens: length of a text to compare on.
        new_tokens: tokens to generate.
        beams: beams of a beam search.
        waiting: requests that run or wait for the worker.
        seconds: time from request to response.
    """

    header_seconds: float = 10.0
    header_lines: int = 100
    header_bytes: int = 32 << 10
    connections: int = 512
    incomplete: int = 256
    body_bytes: int = 1 << 20
    body_seconds: float = 10.0
    linger_seconds: float = 2.0
    prompts: int = 128
    prompt_tokens: int = 4096
    text_tokens: int = 8192
    lens_tokens: int = 128
    compare_tokens: int = 1024
    new_tokens: int = 64
    beams: int = 8
    waiting: int = 8
    seconds: float = 60.0
