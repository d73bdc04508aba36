"""`query`: log-probabilities, entropy, ranks and more of a linear layer's logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, overload

import torch
from torch import Tensor

from lmhead import checks
from lmhead.checks import eager
from lmhead.lazy import LazyLogits
from lmhead.parallel.linear_layer import LinearScores, linear_scores
from lmhead.scores.answers import Answers, Asked, Ids, TopK
from lmhead.sweep import Pointwise, SweptScores, accumulation_dtype
from lmhead.sweep.pair_logits import kept_logsumexp, pair_logits
from lmhead.sweep.small_batch import quick_log_prob


@overload
def query(hidden: Tensor, weight: Tensor, **questions: Any) -> Answers: ...
@overload
def query(
    hidden: Sequence[Tensor], weight: Tensor | Sequence[Tensor], **questions: Any
) -> tuple[Answers, ...]: ...
@eager  # type: ignore[misc]  # the overloads do not repeat the questions
def query(
    hidden: Tensor | Sequence[Tensor],
    weight: Tensor | Sequence[Tensor],
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    log_prob: Ids = None,
    rank: Ids = None,
    entropy: bool = False,
    logsumexp: bool = False,
    argmax: bool = False,
    top_k: int = 0,
    kl_to: LazyLogits | tuple[Tensor, Tensor] | None = None,
    log_sum_sq: bool = False,
    mean_logit: bool = False,
    top1_match: Ids = None,
    row_weight: Tensor | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
    max_bytes: int | None = None,
) -> Answers | tuple[Answers, ...]:
    """Answer any set of questions about the next-token distribution by one sweep.

    Equivalent to: z = F.linear(hidden, weight, bias).float() / temperature, then
    z.log_softmax(-1).gather(...), z.argmax(-1), z.topk(k),
    torch.distributions.Categorical(logits=z).entropy(), and so on.

    Args:
        hidden: (..., D); or several such tensors, of one shape up to D: the hidden states of
            multi-token prediction, or of several heads.
        weight: (V, D); or one for each of several hidden tensors. Several hidden tensors with one
            weight are answered by one sweep over it.
        bias: (V,); -inf masks a token.
        softcap: logits become softcap · tanh(scale · x / softcap).
        scale: a factor of the logits, before soft-capping.
        temperature: positive; the logits are divided by it, after soft-capping. A number, or one
            per row, (...), which gets no gradient.
        log_prob: ids (...) or (..., K) whose log-probability is wanted; or several such tensors.
        rank: ids (...) or (..., K) whose place in the order is wanted; 0 is the argmax.
        entropy: whether to return the entropy.
        logsumexp: whether to return the log of the sum of exp(logits).
        argmax: whether to return the most probable token.
        top_k: number of largest logits to return, with their ids.
        kl_to: return KL(p ‖ q); q is a `LazyLogits` of the same shape, or (hidden, weight). The
            temperature applies to both.
        log_sum_sq: whether to return log Σ p².
        mean_logit: whether to return the mean of the logits that are not -inf.
        top1_match: ids (...) or (..., K) that are compared with the argmax.
        row_weight: (...): multiplies log_prob, entropy and the other differentiable answers of
            each row. Rows of weight 0 cost nothing; their ids and ranks are -1.
        kept: the tokens that a sampler had kept, as CSR arrays (token_ids, offsets): row i could
            have drawn token_ids[offsets[i] : offsets[i + 1]]. log_prob is then normalised over
            these. vLLM's `SamplingMask` and `Generation.kept` have this form.
        max_bytes: bound on temporary memory; None for 128 MiB.

    Returns:
        `Answers`, or one for each of several hidden tensors; questions with an entry per row then
        have a leading dimension for them, as ids (S, ...) for S tensors. log_prob, entropy,
        logsumexp, kl, log_sum_sq and mean_logit are differentiable, together.

    Raises:
        ValueError, TypeError: an argument of the wrong shape, type or range.

    >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(50, 8)
    >>> ids = torch.randint(50, (2, 5))
    >>> answers = query(hidden, weight, log_prob=ids, entropy=True, top_k=3)
    >>> answers.log_prob.shape, answers.entropy.shape, answers.top_k.indices.shape
    (torch.Size([2, 5]), torch.Size([2, 5]), torch.Size([2, 5, 3]))
    """
    others = (rank, top1_match, bias, softcap, kl_to, row_weight, kept, max_bytes)
    sums = entropy or logsumexp or argmax or top_k or log_sum_sq or mean_logit
    plainly = not isinstance(temperature, Tensor) and temperature == scale == 1.0
    plainly = plainly and bool not in (type(temperature), type(scale), type(top_k))
    if log_prob is not None and plainly and not sums and all(o is None for o in others):
        quick = quick_log_prob(hidden, weight, log_prob)
        if quick is not None:
            return Answers(quick)
    questions: dict[str, Any] = {
        "log_prob": log_prob,
        "rank": rank,
        "entropy": entropy,
        "logsumexp": logsumexp,
        "argmax": argmax,
        "top_k": top_k,
        "log_sum_sq": log_sum_sq,
        "mean_logit": mean_logit,
        "top1_match": top1_match,
    }
    options: dict[str, Any] = {
        "bias": bias,
        "softcap": softcap,
        "scale": scale,
        "temperature": temperature,
        "kl_to": kl_to,
        "row_weight": row_weight,
        "kept": kept,
        "max_bytes": max_bytes,
    }
    if isinstance(hidden, Tensor) and isinstance(weight, Tensor):
        return _query(hidden, weight, questions, **options)
    return _several(hidden, weight, questions, options)


def _query(
    hidden: Tensor,
    weight: Tensor,
    questions: dict[str, Any],
    *,
    bias: Tensor | None,
    softcap: float | None,
    scale: float,
    temperature: float | Tensor,
    kl_to: Any,
    row_weight: Tensor | None,
    kept: Any,
    max_bytes: int | None,
) -> Answers:
    checks.check_map(softcap, scale)
    checks.check_max_bytes(max_bytes)
    pointwise = Pointwise.of(softcap=softcap, scale=scale)
    scores, plain = linear_scores(hidden, weight, bias, pointwise, max_bytes=max_bytes)
    lead = plain.shape[:-1]
    kl = kl_to is not None
    asked = Asked.checked(lead, scores.vocab_size, plain.device, kl=kl, **questions)
    _check_temperature(temperature, plain)
    dtype = accumulation_dtype(hidden.dtype)
    if isinstance(kl_to, LazyLogits):
        if row_weight is not None or kept is not None:
            raise ValueError("kl_to must be a pair (hidden, weight) if row_weight or kept is given")
        _check_shape((*lead, scores.vocab_size), tuple(kl_to.shape))
        logits: Any = LazyLogits.of(scores, lead, dtype)
        other_logits: Any = kl_to
        if isinstance(temperature, Tensor) or temperature != 1.0:
            divisor = temperature[..., None] if isinstance(temperature, Tensor) else temperature
            logits, other_logits = logits / divisor, other_logits / divisor
        answers: Answers = logits.ask(kl_to=other_logits, **questions)
        return answers
    other = None if kl_to is None else _pair(kl_to, scores, lead)
    if isinstance(temperature, Tensor) or temperature != 1.0:
        other = None if other is None else other.divided(temperature)
        scores = scores.divided(temperature)
    if kept is not None:
        rest = replace(asked, log_prob=None)
        log_prob = _kept_log_prob(scores, asked, kept)
        computed = (log_prob, *(_compute(scores, rest, other, row_weight) if rest.any else ()))
        if row_weight is not None:
            computed = (log_prob * row_weight.reshape(-1, 1).to(log_prob.dtype), *computed[1:])
        return asked.answers(computed, dtype)
    return asked.answers(_compute(scores, asked, other, row_weight), dtype)


def _compute(
    scores: LinearScores, asked: Asked, other: LinearScores | None, row_weight: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the answers, times a weight per row; rows of weight 0 are left out of the sweep."""
    if row_weight is None:
        return asked.compute(scores, other)
    if row_weight.shape != asked.lead:
        raise ValueError(
            f"row_weight must have shape {tuple(asked.lead)}; got {tuple(row_weight.shape)}"
        )
    flat_weight = row_weight.reshape(-1)
    rows = flat_weight.nonzero()[:, 0]
    other_rows = None if other is None else other.select(rows)
    padded = []
    for values in asked.compute(scores.select(rows), other_rows, rows, flat_weight[rows]):
        dtype = values.dtype
        fill: Any = 0.0 if dtype.is_floating_point else False if dtype == torch.bool else -1
        full = values.new_full((scores.n_rows, *values.shape[1:]), fill)
        padded.append(full.index_copy(0, rows, values))
    return tuple(padded)


def _kept_log_prob(scores: LinearScores, asked: Asked, kept: Any) -> Tensor:
    """Return log-probabilities (N, K) of the ids of log_prob among the kept tokens of each row."""
    ids = asked.rows(asked.log_prob)
    if ids is None:
        raise ValueError("log_prob must be given with kept")
    if not isinstance(scores, SweptScores):
        raise TypeError("kept must be None where the vocabulary is split over ranks")
    n, vocab = scores.n_rows, scores.vocab_size
    token_ids, offsets = _csr(kept, n, vocab, scores.device)
    rows = torch.repeat_interleave(torch.arange(n, device=scores.device), offsets.diff())
    targets = torch.arange(n, device=scores.device)[:, None].expand_as(ids)
    wanted = (targets * vocab + ids).reshape(-1)
    if not bool(torch.isin(wanted, rows * vocab + token_ids).all()):
        raise ValueError("kept must hold every id of log_prob in its row; it does not")
    picked = pair_logits(scores.source, targets.reshape(-1), ids.reshape(-1), scores.max_bytes)
    z = pair_logits(scores.source, rows, token_ids, scores.max_bytes)
    return picked.view_as(ids) - kept_logsumexp(z, rows, n)[:, None]


def _csr(kept: Any, n: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Validate CSR arrays: (token_ids, offsets), or an object with these attributes."""
    pair = (kept.token_ids, kept.offsets) if hasattr(kept, "token_ids") else kept
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"kept must be a pair (token_ids, offsets); got {type(kept).__name__}")
    token_ids, offsets = (torch.as_tensor(x, device=device).reshape(-1) for x in pair)
    checks.check_ids("kept token_ids", token_ids, vocab)
    checks.check_id_type("kept offsets", offsets)
    steps = offsets.diff()
    ends = (len(offsets) == n + 1) and int(offsets[0]) == 0 and int(offsets[-1]) == len(token_ids)
    if not ends or bool((steps < 0).any()):
        raise ValueError(
            f"kept offsets must rise from 0 to {len(token_ids)} in {n + 1} entries, one more than "
            f"rows; got {len(offsets)} entries"
        )
    return token_ids.long(), offsets.long()


def _several(
    hidden: Any, weight: Any, questions: dict[str, Any], options: dict[str, Any]
) -> tuple[Answers, ...]:
    """Answer for several hidden tensors: one sweep for one weight, else one for each weight."""
    hiddens = [hidden] if isinstance(hidden, Tensor) else _tensors("hidden", hidden)
    weights = None if isinstance(weight, Tensor) else _tensors("weight", weight)
    if isinstance(hidden, Tensor) and weights is not None:
        hiddens = hiddens * len(weights)
    if not hiddens or (weights is not None and len(weights) != len(hiddens)):
        count = 0 if weights is None else len(weights)
        raise ValueError(
            f"weight must be one tensor or one for each of {len(hiddens)} hidden; got {count}"
        )
    lead = hiddens[0].shape[:-1]
    if any(h.shape[:-1] != lead for h in hiddens):
        shapes = [tuple(h.shape) for h in hiddens]
        raise ValueError(f"hidden must have one shape up to the last dimension; got {shapes}")
    if weights is None:
        together = _query(torch.stack(hiddens), weight, questions, **options)
        return tuple(_part(together, i) for i in range(len(hiddens)))
    results = []
    for i, (h, w) in enumerate(zip(hiddens, weights, strict=True)):
        own_questions = {k: _part(v, i) if k in _PER_ROW else v for k, v in questions.items()}
        own_options = {k: _part(v, i) if k in _PER_ROW else v for k, v in options.items()}
        if options["kl_to"] is not None or options["kept"] is not None:
            raise ValueError("kl_to and kept must be None where several weights are given")
        results.append(_query(h, w, own_questions, **own_options))
    return tuple(results)


def _tensors(name: str, given: Any) -> list[Tensor]:
    """Validate a list of tensors."""
    several = isinstance(given, list | tuple)
    for item in given if several else [given]:
        if not several or not isinstance(item, Tensor):
            kind = f"{type(item).__name__}{' in it' if several else ''}"
            raise TypeError(f"{name} must be a torch.Tensor or a list of them; got {kind}")
    return list(given)


# Arguments with an entry per row; for several hidden tensors they have one more leading dimension.
_PER_ROW = ("log_prob", "rank", "top1_match", "row_weight", "temperature")


def _part(value: Any, i: int) -> Any:
    """Return entry i of a tensor, or of each tensor in a container; other values unchanged."""
    if isinstance(value, Tensor):
        return value[i] if value.dim() else value
    if isinstance(value, Answers):
        return Answers(**{f.name: _part(getattr(value, f.name), i) for f in fields(value)})
    if isinstance(value, TopK):
        return TopK(*(_part(v, i) for v in value))
    if isinstance(value, list | tuple):
        return tuple(_part(v, i) for v in value)
    return value


def _pair(pair: Any, scores: LinearScores, lead: torch.Size) -> LinearScores:
    """Return the scores of kl_to=(hidden, weight)."""
    if not isinstance(pair, tuple):
        raise TypeError(
            f"kl_to must be a LazyLogits or a pair (hidden, weight); got {type(pair).__name__}"
        )
    if len(pair) != 2:
        raise ValueError(f"kl_to must be a pair (hidden, weight); got {len(pair)} entries")
    names = ("kl_to hidden", "kl_to weight")
    other, plain = linear_scores(*pair, None, Pointwise(), names=names, max_bytes=scores.max_bytes)
    _check_shape((*lead, scores.vocab_size), (*plain.shape[:-1], other.vocab_size))
    if other.dtype != scores.dtype:
        raise TypeError(f"kl_to must be computed in {scores.dtype}; got {other.dtype}")
    return other


def _check_temperature(temperature: float | Tensor, hidden: Tensor) -> None:
    if not isinstance(temperature, Tensor):
        checks.check_number("temperature", temperature, low=0.0, above=True)
        return
    checks.check_device("temperature", temperature, "hidden", hidden)
    if temperature.shape not in ((), hidden.shape[:-1]) or not temperature.is_floating_point():
        raise ValueError(
            f"temperature must be a number or a floating tensor of shape "
            f"{tuple(hidden.shape[:-1])}; got {temperature.dtype} {tuple(temperature.shape)}"
        )
    if not bool(((temperature > 0) & temperature.isfinite()).all()):
        raise ValueError("temperature must be above 0 and finite in every row")


def _check_shape(wanted: tuple[int, ...], given: tuple[int, ...]) -> None:
    if wanted != given:
        raise ValueError(f"kl_to must have logits of shape {wanted}; got {given}")
