"""Bounds of one request, and of the queue."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of a server."""

    header_seconds: float = 10.0  # time for the header of a request to arrive
    header_lines: int = 100  # number of header lines
    header_bytes: int = 32 << 10  # size of a header
    connections: int = 512  # open connections
    # connections without a complete header; if there are more, those that are older than a second
    # are closed
    incomplete: int = 256
    body_bytes: int = 1 << 20  # size of a request's body
    body_seconds: float = 10.0  # time for a body to arrive, whatever its size
    # time during which the rest of a refused body is read and discarded, so that the client can
    # read the response
    linger_seconds: float = 2.0
    prompts: int = 128  # prompts, and choices of all prompts, of a completion request
    prompt_tokens: int = 4096  # length of a prompt; a model's own `max_length` may be smaller
    text_tokens: int = 8192  # length of a text to score
    lens_tokens: int = 128  # length of a prompt for the logit lens
    compare_tokens: int = 1024  # length of a text to compare on
    new_tokens: int = 64  # tokens to generate
    beams: int = 8  # beams of a beam search
    waiting: int = 8  # requests that run or wait for the worker
    seconds: float = 60.0  # time from request to response
