"""How much one request may ask, and how many may wait."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of a server.

    Attributes:
        body_bytes: of a request's body.
        body_seconds: for a body to arrive, whatever its size.
        linger_seconds: for which the rest of a refused body is thrown away, so that its sender
            can read why.
        prompt_tokens: of a prompt; a model's own `max_length` may be smaller.
        text_tokens: of a text that is scored.
        lens_tokens: of a prompt that is looked at layer by layer.
        compare_tokens: of a text along which two models or samplers are compared.
        new_tokens: that a model is asked to write.
        beams: of a beam search.
        waiting: requests for the worker at one time, the running one included.
        seconds: from the question to the answer; then the work is given up.
    """

    body_bytes: int = 1 << 20
    body_seconds: float = 10.0
    linger_seconds: float = 2.0
    prompt_tokens: int = 4096
    text_tokens: int = 8192
    lens_tokens: int = 128
    compare_tokens: int = 1024
    new_tokens: int = 64
    beams: int = 8
    waiting: int = 8
    seconds: float = 60.0
