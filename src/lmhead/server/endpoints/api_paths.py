"""Continuations of a prompt by greedy decoding, a sampler and beam search.

POST /api/paths    {"model": NAME, "prompt": text or "ids": [...], "more": [...],
                    "tokens": 16, "beams": 4, "sampler": {"temperature": 0.8, "seed": 0, ...},
                    "stream": false}

The response is {"greedy", "sampler", "beam"}, each {"name", "tokens", "log_prob", "ended"}; a token
has its id, the model's log-probability, and the sampler's where a sampler chose it. With "stream",
it comes in lines, each with the tokens so far; while beam search runs, only the log-probability
of its whole text is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lmhead.analysis.token_text import finite
from lmhead.models import LanguageModel
from lmhead.sampling import Sampler, stream_beam_search, stream_generate
from lmhead.server.api_context import ApiContext, Part, check_length, parse_sampler
from lmhead.server.request_fields import wrong_value
from lmhead.server.worker import Cancellation

# Options that the page can set.
OPTIONS = frozenset(
    {
        "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty",
        "presence_penalty", "top_k", "seed", "dynatemp_range", "dynatemp_exponent", "top_h",
        "epsilon_cutoff", "eta_cutoff", "top_n_sigma", "xtc_probability", "xtc_threshold",
        "mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base",
        "dry_allowed_length",
    }
)  # fmt: skip


def routes(api: ApiContext) -> list[Route]:
    """Return the route of this file."""
    known = {"model", "prompt", "ids", "more", "tokens", "beams", "sampler", "stream"}

    async def paths(request: Request) -> Response:
        fields = await api.read(request, known)
        model = api.model(fields.get("model"))
        prompt, more = api.prompt(fields), fields.ids("more") if "more" in fields else []
        tokens = fields.integer("tokens", 1, api.limits.new_tokens, 16)
        beams = fields.integer("beams", 1, api.limits.beams, 4)
        sampler = _sampler(fields.get("sampler", {}))

        def job(_: Cancellation) -> Iterator[Part]:
            ids = api.tokens(model, prompt)
            text = _Continuation(model, api.tokens(model, ids + more), len(ids))
            count = text.max_new_tokens(tokens)
            continuations = [
                text.generated("greedy", None, count),
                text.generated("sampler", sampler, count),
                text.beam(beams, count),
            ]
            return _in_turns(continuations, count)

        return await api.respond(request, fields, job)

    return [Route("/api/paths", paths, methods=["POST"])]


def _sampler(field: object) -> Sampler:
    """Return the sampler of a request, with its stages in the order of `stages` if given."""
    if not isinstance(field, Mapping) or "stages" not in field:
        return parse_sampler(field, "sampler", OPTIONS)
    options = {name: value for name, value in field.items() if name != "stages"}
    sampler, names = parse_sampler(options, "sampler", OPTIONS), field["stages"]
    by_name = {stage.name: stage for stage in sampler.stages}
    if "dynatemp_range" in by_name:
        by_name["temperature"] = by_name.pop("dynatemp_range")
    if not isinstance(names, list) or sorted(map(str, names)) != sorted(by_name):
        message = f"sampler.stages must name the active stages: {', '.join(sorted(by_name))}"
        raise wrong_value(message)
    try:
        return Sampler(stages=[by_name[name] for name in names], seed=sampler.seed)
    except ValueError as error:
        raise wrong_value(f"sampler: {error}") from None


def _in_turns(paths: list[Iterator[Part]], count: int) -> Iterator[Part]:
    """Yield each path after each of its steps; all take turns."""
    running, done, total = list(paths), 0, len(paths) * count
    while running:
        for steps in list(running):
            path = next(steps, None)
            if path is None:
                running.remove(steps)
                continue
            done = min(done + 1, total)
            yield {path["name"]: path, "progress": [done, total]}


@dataclass(frozen=True)
class _Continuation:
    """A text to continue: ids, and the length of the prompt."""

    model: LanguageModel
    ids: list[int]
    prompt_length: int

    def max_new_tokens(self, tokens: int) -> int:
        """Return the number of tokens that fit the model's context, at most `tokens`."""
        context = self.model.max_length
        if context is None:
            return tokens
        check_length("text", len(self.ids), 1, context - 1)  # at least one token must fit
        return min(tokens, context - len(self.ids))

    def generated(self, name: str, sampler: Sampler | None, count: int) -> Iterator[Part]:
        """Generate token by token, with a sampler or greedily."""
        tokens: list[tuple[int, float, float | None]] = []
        chooser = None if sampler is None else self._with_prompt_length(sampler)
        for event in stream_generate(self.model, self.ids, chooser, max_new_tokens=count):
            tokens.append((event.token, event.log_prob, event.sampler_log_prob))
            yield _path(name, tokens, ended=event.finish_reason == "eos")

    def _with_prompt_length(self, sampler: Sampler) -> Callable[..., Any]:
        """Return the sampler with this prompt length; some penalties count only later tokens."""

        def choose(*args: Any, **options: Any) -> Any:
            return sampler(*args, **{**options, "prompt_length": self.prompt_length})

        return choose

    @torch.no_grad()
    def beam(self, beams: int, count: int) -> Iterator[Part]:
        """Search step by step; at the end, with the model's log-probability of each token."""
        best: list[int] = []
        options: dict[str, Any] = {"num_beams": beams, "max_new_tokens": count}
        for beams_so_far in stream_beam_search(self.model, [self.ids], **options):
            best = beams_so_far.best[0]
            yield {
                "name": "beam",
                "tokens": [{"id": id, "log_prob": None, "sampler_log_prob": None} for id in best],
                "log_prob": finite(beams_so_far.scores[0][0] * len(best)),
                "ended": False,
            }
        hidden, _ = self.model.hidden(torch.tensor([[*self.ids, *best[:-1]]]))
        logits = self.model.head(hidden[0, len(self.ids) - 1 :]).double()
        answers: Any = logits.ask(log_prob=torch.tensor(best))
        tokens = [
            (id, log_prob, None)
            for id, log_prob in zip(best, answers.log_prob.tolist(), strict=True)
        ]
        yield _path("beam", tokens, ended=best[-1] in self.model.eos_token_ids)


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
