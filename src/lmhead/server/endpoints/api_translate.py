"""A greedy translation by the run given at launch, with the head's predictions at every position.

POST /api/translate    {"text": sentence}

The response:

    model    {"name", "parameters", "vocab_size", "hidden_size"}
    source   tokens of the sentence, with the end token: what the encoder reads
    steps    per token of the translation: the token, its `p`, and `best`, the top tokens with `p`
    text     the translation

Errors: "no_translation" if the run does not translate or has no checkpoint yet.
"""

from __future__ import annotations

from typing import Any

import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmhead.analysis.token_text import Piece
from lmhead.errors import ModelError
from lmhead.models.checkpoint import TOKENIZER, find_checkpoint
from lmhead.models.json_tokenizer import JsonTokenizer
from lmhead.models.translator import Translator, load_translator
from lmhead.server.api_context import ApiContext, check_length
from lmhead.server.request_fields import RequestError
from lmhead.server.worker import Cancellation

MAX_TOKENS = 64  # of a sentence, and of its translation
TOP = 5


def routes(api: ApiContext) -> list[Route]:
    """Return the route of this file."""
    opened: dict[str, tuple[Translator, JsonTokenizer]] = {}  # by checkpoint; the last one only

    def open_run() -> tuple[Translator, JsonTokenizer]:
        if api.run is None:
            raise RequestError(404, "no_translation", "no training run was given at launch")
        try:
            folder = find_checkpoint(api.run)
            if str(folder) not in opened:
                pair = load_translator(folder), JsonTokenizer(folder / TOKENIZER)
                opened.clear()
                opened[str(folder)] = pair
        except ModelError as error:
            # Only the run's name: a response names no folder of this machine.
            message = str(error).replace(str(api.run), api.run.name)
            raise RequestError(404, "no_translation", message) from None
        return opened[str(folder)]

    async def translate(request: Request) -> Response:
        fields = await api.read(request, {"text"})
        text = fields.text("text")
        document = await api.work(
            request, lambda cancellation: _translate(api, *open_run(), text, cancellation)
        )
        return JSONResponse(document)

    return [Route("/api/translate", translate, methods=["POST"])]


@torch.no_grad()
def _translate(
    api: ApiContext,
    translator: Translator,
    tokenizer: JsonTokenizer,
    text: str,
    cancellation: Cancellation,
) -> dict[str, Any]:
    model = translator.model
    source = [*tokenizer.encode(text.strip(), bos=False), translator.end]
    limit = min(MAX_TOKENS, model.config.max_length)
    check_length("text", len(source) - 1, 1, limit - 1)
    translation = translator.translate([text], num_beams=1, max_new_tokens=limit)[0][0]
    cancellation.check()
    # One pass over the whole translation: the head has a row of logits for every position.
    target = torch.tensor([[translator.begin, *translation.ids[:-1]]])
    log_probs = model(torch.tensor([source]), target)[0].log_softmax(-1)
    best = log_probs.topk(min(TOP, model.config.vocab_size)).indices
    ids = torch.cat((torch.tensor(translation.ids)[:, None], best), -1)
    shares = log_probs.gather(-1, ids).exp().tolist()

    def token(id: int) -> dict[str, Any]:
        data = tokenizer.token_bytes(id)
        return Piece(id, data, None if data else tokenizer.token_name(id)).to_json()

    steps = []
    for row, p in zip(ids.tolist(), shares, strict=True):
        tokens = [{**token(id), "p": share} for id, share in zip(row, p, strict=True)]
        steps.append({**tokens[0], "best": tokens[1:]})
    return {
        "model": {
            "name": "" if api.run is None else api.run.name,
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "vocab_size": model.config.vocab_size,
            "hidden_size": model.config.hidden_size,
        },
        "source": [token(id) for id in source],
        "steps": steps,
        "text": translation.text,
    }
