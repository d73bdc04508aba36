"""`lmhead check`: compare a model's head with the float64 reference, on its own hidden states.

Loss, gradients and log-probabilities are compared with `lmhead.reference`. The error may be at most
that of plain torch in the same dtype on the same input, plus four epsilons. Tokens must be equal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from lmhead.cli import _json
from lmhead.cli._command_group import THRESHOLD, integer_option
from lmhead.cli._model_arguments import model_json, model_options, open_model
from lmhead.cli._terminal import table

if TYPE_CHECKING:
    from torch import Tensor

    from lmhead.head import LMHead
    from lmhead.models import LanguageModel

TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, people walked on the moon for the first "
    "time: “one small step”. 床前明月光，疑是地上霜。 def f(x): return x ** 2"
)
_TOP = 10
_NUMBERS = 2**25  # most weights compared: the reference holds several float64 copies


@dataclass(frozen=True)
class Finding:
    """One comparison: our error, plain torch's, and the limit."""

    what: str
    error: float
    torch_error: float | None
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit; False for NaN."""
        return self.error <= self.limit


@click.command("check")
@click.argument("model", required=False)
@integer_option("--tokens", default=24, low=2, help="Number of hidden states to compare on.")
@model_options
@_json.json_option
def command(model: str | None, tokens: int, as_json: bool) -> None:
    """Check a model's head against the float64 reference.

    The model reads a short text. Loss, gradients and log-probabilities of its hidden states must be
    as close to the reference as plain torch is, and every token must be the same, from the weight
    and from the quantized copy of certified decode. Exit code 4 if a check fails.

    \b
    Examples:
      lmhead check smollm2
      lmhead check ./Qwen3-0.6B --tokens 8
      lmhead check model.gguf --json
    """
    opened = open_model(model)
    require_lm_head(opened)
    head, hidden, targets = read_sample(opened, tokens)
    findings = compare(head, hidden, targets)
    checked, vocab = head.vocab_size, opened.head.vocab_size
    if as_json:
        rows = [asdict(finding) | {"passed": finding.passed} for finding in findings]
        _json.write(
            "check",
            model=model_json(opened),
            tokens=len(hidden),
            vocab_tokens=checked,
            words=checked,  # english: word, the former name of vocab_tokens
            checks=rows,
        )
    else:
        part = f"{vocab:,} tokens" if checked == vocab else f"{checked:,} of {vocab:,} tokens"
        click.echo(f"{opened.name}: {len(hidden)} hidden states, {part}, {head.weight.dtype}\n")
        for line in _lines(findings):
            click.echo(line)
    failed = [finding.what for finding in findings if not finding.passed]
    if failed:
        click.echo(f"Failed: {', '.join(failed)}.", err=True)
        raise SystemExit(THRESHOLD)


def require_lm_head(model: LanguageModel) -> None:
    """Refuse a factored head: the reference has one weight matrix."""
    from lmhead.head import LMHead

    if not isinstance(model.head, LMHead):
        raise click.ClickException(
            f"{model.name} has a factored head ({type(model.head).__name__}); this command "
            "supports only LMHead."
        )


def read_sample(model: LanguageModel, tokens: int) -> tuple[LMHead, Tensor, Tensor]:
    """Return a head on the first tokens, hidden states (N, D) of a text, and their targets."""
    import torch

    from lmhead.head import LMHead

    if model.max_length is not None:
        tokens = min(tokens, model.max_length - 1)
    ids = list(model.tokenizer.encode(TEXT)) if model.tokenizer is not None else []
    while len(ids) <= tokens:  # a short text or no tokenizer: any ids will do
        ids += [(7 * len(ids) + 3) % model.head.vocab_size]
    sample = torch.tensor([ids[: tokens + 1]])
    with torch.no_grad():
        hidden, _ = model.hidden(sample[:, :-1])
    full_head = model.head
    vocab = max(2, min(full_head.vocab_size, _NUMBERS // full_head.hidden_size))
    options: Any = {"softcap": full_head.softcap, "scale": full_head.scale, "device": "meta"}
    head = LMHead(full_head.hidden_size, vocab, **options)
    head.weight = torch.nn.Parameter(full_head.weight.detach()[:vocab])
    if full_head.bias is not None:
        head.bias = torch.nn.Parameter(full_head.bias.detach()[:vocab])
    return head, hidden[0].detach(), sample[0, 1:] % vocab


def compare(head: LMHead, hidden: Tensor, targets: Tensor) -> list[Finding]:
    """Run every comparison, for hidden (N, D) and targets (N,)."""
    import torch
    import torch.nn.functional as F

    from lmhead import reference as ref
    from lmhead.screen import ScreenedHead

    options: dict[str, Any] = {"softcap": head.softcap, "scale": head.scale}
    h, w = hidden.double().numpy(), head.weight.detach().double().numpy()
    b = None if head.bias is None else head.bias.detach().double().numpy()
    y = targets.numpy()
    logits = ref.head_logits(h, w, bias=b, **options)
    true = {
        "loss": torch.from_numpy(ref.cross_entropy(logits, y)[None]),
        "log-probabilities": torch.from_numpy(ref.log_prob(logits, y)),
    }
    grads = ref.linear_cross_entropy_backward(h, w, y, bias=b, **options)
    true["gradient of the hidden state"] = torch.from_numpy(grads.x)
    true["gradient of the weight"] = torch.from_numpy(grads.weight)

    def answers(dense: bool) -> dict[str, Tensor]:
        x = hidden.clone().requires_grad_()
        z: Any = _dense(x, head) if dense else head(x)
        loss = F.cross_entropy(z, targets)
        grad = torch.autograd.grad(loss, (x, head.weight))
        picked = z.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        given = (loss[None], picked, *grad)
        return {what: t.detach().double() for what, t in zip(true, given, strict=True)}

    ours, plain = answers(False), answers(True)
    step = 4 * torch.finfo(hidden.dtype).eps
    findings = []
    for what, truth in true.items():
        error, theirs = _relative_error(ours[what], truth), _relative_error(plain[what], truth)
        findings.append(Finding(what, error, theirs, theirs + step))

    best = torch.from_numpy(ref.top_k(logits, min(_TOP, head.vocab_size))[1])
    k = best.shape[-1]
    with torch.no_grad():
        decisions = {
            "argmax": head(hidden).argmax(-1)[:, None],
            f"top {k}": head(hidden).topk(k)[1],
        }
        if hidden.device.type == "cpu":
            copy = ScreenedHead(head)
            decisions["certified argmax"] = copy.argmax(hidden).token[:, None]
            decisions[f"certified top {k}"] = copy.topk(hidden, k).indices
    for what, ids in decisions.items():
        wrong = int((ids != best[:, : ids.shape[1]]).any(1).sum())
        findings.append(Finding(what, wrong, None, 0))
    return findings


def _dense(hidden: Tensor, head: LMHead) -> Tensor:
    """Return the logits as plain torch computes them."""
    import torch.nn.functional as F

    z = head.scale * F.linear(hidden, head.weight, head.bias)
    return z if head.softcap is None else head.softcap * (z / head.softcap).tanh()


def _relative_error(result: Tensor, truth: Tensor) -> float:
    """Return the norm of the difference, relative to that of the truth."""
    return float((result - truth).norm() / truth.norm().clamp(min=1e-300))


def _lines(findings: list[Finding]) -> list[str]:
    rows = [["", "ours", "plain torch", "limit", ""]]
    for finding in findings:
        counted = finding.torch_error is None
        error = f"{finding.error:.0f} wrong" if counted else f"{finding.error:.1e}"
        rows.append(
            [
                finding.what,
                error,
                "" if counted else f"{finding.torch_error:.1e}",
                f"{finding.limit:.0f}" if counted else f"{finding.limit:.1e}",
                "ok" if finding.passed else "FAILED",
            ]
        )
    return table(rows, [-30, 12, 14, 12, 0])
