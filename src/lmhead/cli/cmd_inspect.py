"""`lmhead inspect`: a model's head, the memory of its logits, and advice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli._command_group import integer_option
from lmhead.cli._model_arguments import model_json, model_options, open_model

if TYPE_CHECKING:
    from lmhead.models import LanguageModel


@click.command("inspect")
@click.argument("model", required=False)
@integer_option(
    "--tokens", default=8192, help="Tokens per training step, for memory and time estimates."
)
@model_options
@_json.json_option
def command(model: str | None, tokens: int, as_json: bool) -> None:
    """Show a model's head: sizes, dtype, memory, advice.

    MODEL is a folder, a file, or a name from `lmhead models list`.

    \b
    Examples:
      lmhead inspect smollm2
      lmhead inspect ./Qwen3-0.6B --tokens 16384
      lmhead inspect model.gguf --json
    """
    opened = open_model(model)
    facts = examine(opened, tokens)
    if as_json:
        _json.write("inspect", **(facts | {"model": model_json(opened)}))
        return
    for line in lines(facts):
        click.echo(line)


def examine(model: LanguageModel, tokens: int) -> dict[str, Any]:
    """Return the facts by name; memory in bytes."""
    from torch import nn

    from lmhead.sweep.questions import DEFAULT_MAX_BYTES
    from lmhead.tying import advise_tying
    from lmhead.vocab import FactoredHead, advise

    head: Any = model.head  # an LMHead or a factored head
    weight = next(head.parameters())
    body = model.body if isinstance(model.body, nn.Module) else nn.Module()
    inner = list(body.parameters())
    layers = max((len(m) for m in body.modules() if isinstance(m, nn.ModuleList)), default=0)
    own = [p for p in head.parameters() if not any(p is other for other in inner)]
    size = weight.dtype.itemsize
    tying = advise_tying(head.vocab_size, head.hidden_size, layers, bytes_per_parameter=size)
    logits = tokens * head.vocab_size * size
    return {
        "model": model.name,
        "vocab_size": head.vocab_size,
        "hidden_size": head.hidden_size,
        "layers": layers,
        "max_length": model.max_length,
        "tied": any(p is other for p in head.parameters() for other in inner),
        "head": type(head).__name__,
        "head_sizes": head.extra_repr(),
        "bias": getattr(head, "bias", None) is not None,
        "softcap": getattr(head, "softcap", None),
        "scale": getattr(head, "scale", 1.0),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in (*inner, *own)),
        "head_parameters": sum(p.numel() for p in head.parameters()),
        "eos_token_ids": list(model.eos_token_ids),
        "chat": model.chat is not None,
        "tokenizer_size": None if model.tokenizer is None else len(model.tokenizer),
        "memory": {
            "tokens": tokens,
            "logits": logits,
            # A dense loss holds logits, log-softmax, and their gradient.
            "dense_step": 3 * logits,
            "lmhead_step": min(DEFAULT_MAX_BYTES, 3 * logits),
        },
        # A factored head has no weight with the shape of the embedding.
        "tying": None
        if isinstance(head, FactoredHead)
        else {"tie": tying.tie, "share": tying.share, "reasons": list(tying.reasons)},
        "head_advice": advise(
            head.vocab_size, head.hidden_size, tokens, layers=layers or None
        ).to_dict(),
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts as text."""
    from lmhead.vocab import Advice

    memory, tying = facts["memory"], facts["tying"]
    share = facts["head_parameters"] / facts["parameters"]
    what = {
        "vocabulary": f"{facts['vocab_size']:,} tokens" + _tokenizer(facts),
        "hidden size": f"{facts['hidden_size']:,}",
        "layers": f"{facts['layers']}",
        "head": ", ".join(_head(facts)),
        "dtype": facts["dtype"],
        "parameters": f"{facts['parameters']:,}, {share:.0%} of them in the head",
        "context": "any number of tokens"
        if facts["max_length"] is None
        else f"{facts['max_length']:,} tokens",
        "chat": "has a chat template: lmhead generate --chat" if facts["chat"] else "",
    }
    shown = [f"{facts['model']}", ""]
    shown += [f"  {name:<15}{value}" for name, value in what.items() if value]
    shown += [
        "",
        f"Logits of {memory['tokens']:,} tokens: {_size(memory['logits'])}. A training step with a "
        f"dense loss holds about {_size(memory['dense_step'])}",
        f"(logits, log-softmax, gradient); with lmhead at most {_size(memory['lmhead_step'])}.",
    ]
    if tying is not None:
        shown += ["", _tying(facts["tied"], tying), *(f"  - {r}" for r in tying["reasons"])]
    return [*shown, "", str(Advice.from_dict(facts["head_advice"]))]


def _tokenizer(facts: dict[str, Any]) -> str:
    size = facts["tokenizer_size"]
    if size is None:
        return ", no tokenizer"
    unused = facts["vocab_size"] - size
    return f", {unused:,} of them unused by the tokenizer" if unused > 0 else ""


def _head(facts: dict[str, Any]) -> list[str]:
    if facts["head"] != "LMHead":
        return [f"{facts['head']}({facts['head_sizes']})"]
    parts = ["tied to the embedding" if facts["tied"] else "own weight, not tied"]
    parts.append("with bias" if facts["bias"] else "no bias")
    if facts["softcap"] is not None:
        parts.append(f"soft-capped at ±{facts['softcap']:g}")
    if facts["scale"] != 1.0:
        parts.append(f"logits times {facts['scale']:g}")
    return parts


def _tying(tied: bool, advice: dict[str, Any]) -> str:
    now = "The head is tied to the embedding" if tied else "The head is not tied to the embedding"
    if tied == advice["tie"]:
        return f"{now}, as recommended for a model of these sizes:"
    return f"{now}; {'tying' if advice['tie'] else 'untying'} is recommended for these sizes:"


def _size(count: int) -> str:
    """Format a number of bytes.

    >>> _size(3 * 2**29), _size(5000)
    ('1.5 GiB', '4.9 KiB')
    """
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:,.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
