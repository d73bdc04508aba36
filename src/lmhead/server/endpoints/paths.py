"""How greedy choice, a sampler and beam search would go on from a prompt.

POST /api/paths    {"model": NAME, "prompt": text or "ids": [...], "more": [...],
                    "tokens": 16, "beams": 4, "sampler": {"temperature": 0.8, "seed": 0, ...}}

The answer is {"paths": [greedy, sampler, beam]}, each {"name", "tokens", "log_prob", "ended"}; a
token has its id, the model's log-probability, and the sampler's where it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.analysis.tokens import finite
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler, TokenEvent, beam_search, stream_generate
from lmhead.server.desk import Desk, Refused, answering, check_length
from lmhead.server.work import Ticket

__all__ = ["routes"]

# What the page can set, and between which bounds a number makes sense.
_NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.01, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.001, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "presence_penalty": (-100.0, 100.0),
}
_WHOLE: dict[str, tuple[int, int]] = {"top_k": (0, 2**31), "seed": (0, 2**53 - 1)}


def routes(desk: Desk) -> list[Route]:
    """The one of this file."""
    fields = {"model", "prompt", "ids", "more", "tokens", "beams", "sampler"}

    async def paths(request: Request) -> Response:
        asked = await desk.read(request, fields)
        _, model = desk.model(asked.get("model"))
        prompt, more = desk.prompt(asked), desk.more(asked)
        tokens = desk.whole(asked, "tokens", 1, desk.limits.new_tokens, 16)
        beams = desk.whole(asked, "beams", 1, desk.limits.beams, 4)
        sampler = _sampler(asked.get("sampler", {}))

        def job(ticket: Ticket) -> list[dict[str, Any]]:
            ids = desk.tokens(model, prompt)
            text = _Text(model, desk.tokens(model, ids + more), len(ids), ticket)
            room = text.room(tokens)
            return [
                text.written("greedy", None, room),
                text.written("sampler", sampler, room),
                text.searched(beams, room),
            ]

        return JSONResponse({"paths": await desk.work(request, job)})

    return [Route("/api/paths", answering(paths), methods=["POST"])]


def _sampler(given: object) -> Sampler:
    """The sampler that a request describes."""
    if not isinstance(given, Mapping):
        raise Refused(400, "wrong_value", "sampler must be an object of options")
    for name, value in given.items():
        if name in _NUMBERS or name in _WHOLE:
            low, high = _WHOLE[name] if name in _WHOLE else _NUMBERS[name]
            kinds = (int,) if name in _WHOLE else (int, float)
            if type(value) not in kinds or not low <= value <= high:
                what = "a whole number" if name in _WHOLE else "a number"
                message = f"sampler.{name} must be {what} from {low:g} to {high:g}"
                raise Refused(400, "wrong_value", message)
        elif name != "order":
            known = ", ".join(sorted([*_NUMBERS, *_WHOLE, "order"]))
            message = f"the options of sampler are {known}; got {str(name)[:40]!r}"
            raise Refused(400, "wrong_value", message)
    if given.get("order", "hf") not in ("hf", "vllm", "llama.cpp"):
        raise Refused(400, "wrong_value", "sampler.order must be hf, vllm or llama.cpp")
    return Sampler(**{"seed": 0, **given})


@dataclass(frozen=True)
class _Text:
    """A text to go on from: the ids, how many of them are the prompt, and who waits for it."""

    model: LanguageModel
    ids: list[int]
    prompt_length: int
    ticket: Ticket

    def room(self, tokens: int) -> int:
        """How many tokens may come, no more than the model can see."""
        most = self.model.max_length
        if most is None:
            return tokens
        check_length("text", len(self.ids), 1, most - 1)  # one must have room behind it
        return min(tokens, most - len(self.ids))

    def written(self, name: str, sampler: Sampler | None, room: int) -> dict[str, Any]:
        """Word by word, by a sampler or the best one each time."""
        events: list[TokenEvent] = []
        chooser = None if sampler is None else self._knowing_the_prompt(sampler)
        for event in stream_generate(self.model, self.ids, chooser, max_new_tokens=room):
            self.ticket.check()
            events.append(event)
        tokens = [(e.token, e.log_prob, e.sampler_log_prob) for e in events]
        return _path(name, tokens, ended=events[-1].finish_reason == "eos")

    def _knowing_the_prompt(self, sampler: Sampler) -> Callable[..., Any]:
        """The sampler, for which only a part of what it goes on from is the prompt.

        Penalties may count what came behind it.
        """

        def choose(*args: Any, **options: Any) -> Any:
            return sampler(*args, **{**options, "prompt_length": self.prompt_length})

        return choose

    @torch.no_grad()
    def searched(self, beams: int, room: int) -> dict[str, Any]:
        """The best that beam search finds, with the model's log-probabilities read from it."""
        found = beam_search(self.model, [self.ids], num_beams=beams, max_new_tokens=room)
        self.ticket.check()
        words = found.best[0]
        hidden, _ = self.model.hidden(torch.tensor([[*self.ids, *words[:-1]]]))
        logits = self.model.head(hidden[0, len(self.ids) - 1 :]).double()
        log_probs = logits.ask(log_prob=torch.tensor(words)).log_prob
        assert log_probs is not None
        tokens = [
            (id, log_prob, None) for id, log_prob in zip(words, log_probs.tolist(), strict=True)
        ]
        return _path("beam", tokens, ended=words[-1] in self.model.eos_token_ids)


def _path(
    name: str, tokens: Sequence[tuple[int, float, float | None]], *, ended: bool
) -> dict[str, Any]:
    return {
        "name": name,
        "tokens": [
            {
                "id": id,
                "log_prob": finite(log_prob),
                "sampler_log_prob": None if drawn is None else finite(drawn),
            }
            for id, log_prob, drawn in tokens
        ],
        "log_prob": finite(sum(log_prob for _, log_prob, _ in tokens)),
        "ended": ended,
    }
