"""`ScreenedHead`: the argmax and the top k of a head, from a quantized copy, with a certificate.

`candidates.decide` has the steps. Where the bound leaves too many tokens, the head is swept as
without a copy, and the certificate says so.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmhead import checks
from lmhead.screen import candidates, store
from lmhead.screen.build_copy import OnRows, build
from lmhead.screen.candidates import Candidates, decide
from lmhead.screen.copy_cache import cached_copy
from lmhead.screen.quantized_weight import Bits, QuantizedWeight
from lmhead.screen.states import STATES_PER_PASS, usable
from lmhead.sweep import Pointwise, Questions, Source, row_answers


@dataclass(frozen=True)
class Certificate:
    """How an answer was found.

    Attributes:
        rows_rescored: (...), for each hidden state how many tokens were scored in float64.
        fell_back: (...), whether all tokens were scored: too many were left, or a stage
            is not supported.
        bytes_read: of copy and weight together, for the whole batch.
    """

    rows_rescored: Tensor
    fell_back: Tensor
    bytes_read: int

    @property
    def fall_back_rate(self) -> float:
        """The share of hidden states for which all tokens were scored."""
        return float(self.fell_back.double().mean()) if self.fell_back.numel() else 0.0

    def reshape(self, lead: torch.Size) -> Certificate:
        """Return the same for hidden states of another shape."""
        rescored, fell = self.rows_rescored.reshape(lead), self.fell_back.reshape(lead)
        return Certificate(rescored, fell, self.bytes_read)


class ScreenedArgmax(NamedTuple):
    """token (...): the id of the largest float64 logit, the lowest among equals."""

    token: Tensor
    certificate: Certificate


class ScreenedTopK(NamedTuple):
    """values (..., k) in float64 and indices (..., k), by value, ties by lowest id."""

    values: Tensor
    indices: Tensor
    certificate: Certificate


class Interval(NamedTuple):
    """Two numbers per hidden state between which the true one lies, (...) each; equal if exact."""

    low: Tensor
    high: Tensor


class ScreenedSample(NamedTuple):
    """token (...): what the sampler gives for `head(hidden)`.

    log_prob is of the distribution that the token was drawn from, raw_log_prob of the model's own.
    """

    token: Tensor
    log_prob: Interval
    raw_log_prob: Interval
    certificate: Certificate

    def reshape(self, lead: torch.Size) -> ScreenedSample:
        """Return the same for hidden states of another shape."""
        if self.token.shape == lead:
            return self
        return ScreenedSample(
            self.token.reshape(lead),
            Interval(*(x.reshape(lead) for x in self.log_prob)),
            Interval(*(x.reshape(lead) for x in self.raw_log_prob)),
            self.certificate.reshape(lead),
        )


class Verification(NamedTuple):
    """How often the answer was another than that of float64 over all tokens: must be 0."""

    states: int
    disagreements: int
    certificate: Certificate


@dataclass
class ScreenReport:
    """What certified decode did so far.

    Attributes:
        choices: number of tokens chosen.
        bytes_read: bytes of copy and weight read for all of them.
        bytes_full: bytes that reading the whole weight at every step would have taken.
        rows_rescored: number of tokens scored in float64 per choice, on average.
        fell_back: number of choices for which the bounds left too much and all tokens were scored.
    """

    choices: int = 0
    bytes_read: int = 0
    bytes_full: int = 0
    rows_rescored: float = 0.0
    fell_back: int = 0

    def add(self, certificate: Certificate, weight_bytes: int) -> None:
        """Count the rows of one call."""
        rows = certificate.fell_back.numel()
        if rows == 0:
            return
        rescored = sum(certificate.rows_rescored.flatten().tolist())
        total = self.rows_rescored * self.choices + rescored
        self.choices += rows
        self.rows_rescored = total / self.choices
        self.bytes_read += certificate.bytes_read
        self.bytes_full += weight_bytes
        self.fell_back += sum(certificate.fell_back.flatten().tolist())

    @property
    def share_read(self) -> float:
        """The share of the bytes that was read."""
        return self.bytes_read / self.bytes_full if self.bytes_full else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return every attribute, and `share_read`."""
        return asdict(self) | {"share_read": self.share_read}


class ScreenedHead:
    """A head with a quantized copy of its weight: the same tokens, fewer bytes read.

    Equivalent to: head(hidden).argmax(-1), head(hidden).topk(k)

    The weight itself stays: the rows that decide are read from it. The copy belongs to the weight
    as it is now; after a change to the weight, build another.

    Args:
        head: an `LMHead` on the CPU, without a low-rank delta.
        bits: 8; or "4+4", which reads the high nibbles of all tokens first and the low ones of
            those that are left: fewer bytes, more tokens rescored.
        calibration: hidden states (..., D), a few hundred that are typical of later ones: the copy
            is then more precise in their directions.
        progress: called with the number of rows done and of all rows while the copy is made.
        cache: read the copy from the cache folder, or keep it there: the next process does not
            make it again. Not with calibration.

    >>> from lmhead import LMHead
    >>> head = LMHead(64, 1000)
    >>> screened = ScreenedHead(head)
    >>> hidden = torch.randn(3, 64)
    >>> answer = screened.argmax(hidden)
    >>> bool((answer.token == head(hidden).argmax(-1)).all())
    True
    >>> answer.certificate.fell_back
    tensor([False, False, False])
    """

    def __init__(
        self,
        head: Any,
        *,
        bits: Bits = 8,
        calibration: Tensor | None = None,
        progress: OnRows | None = None,
        cache: bool = False,
    ) -> None:
        _check_head(head)
        if bits not in (8, "4+4"):
            raise ValueError(f'bits must be 8 or "4+4"; got {bits!r}')
        if calibration is not None:
            _check_calibration(calibration, head)
        if cache and calibration is not None:
            raise ValueError("cache must be False with calibration; got True")
        weight = head.weight.detach()
        if cache:
            copy = cached_copy(weight, bits=bits, progress=progress)
        else:
            copy = build(weight, bits=bits, calibration=calibration, progress=progress)
        self._own(head, copy)

    def _own(self, head: Any, copy: QuantizedWeight) -> None:
        self.head, self.copy = head, copy
        # A reference to the weight keeps its memory from being reused.
        self._weight, self._version = head.weight.detach(), _changes(head.weight)
        self._bias: tuple[Tensor, int | None, Tensor | None] | None = None
        self._pickled_hash: str | None = None
        self.report = ScreenReport()

    # After pickle or deepcopy the weight is another tensor: its hash is compared.

    def __getstate__(self) -> dict[str, Any]:
        digest = store.tensor_hash(self._weight) if self.fresh() else None
        return {"head": self.head, "copy": self.copy, "report": self.report, "weight_hash": digest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.head, self.copy, self.report = state["head"], state["copy"], state["report"]
        # The head may have no weight yet: it is compared at the first question.
        self._weight, self._version, self._bias = torch.empty(0), None, None
        self._pickled_hash = state["weight_hash"]

    def _attach_to_copied_weight(self) -> None:
        """Refer to the weight of a copied head, if its hash is that of this copy's weight."""
        digest, self._pickled_hash = self._pickled_hash, None
        weight = self.head.weight
        if checks.is_plain(weight) and store.tensor_hash(weight) == digest:
            self._weight, self._version = weight.detach(), _changes(weight)

    # The copy -------------------------------------------------------------------------------------

    @property
    def bits(self) -> Bits:
        """8 or "4+4"."""
        return self.copy.bits

    @property
    def nbytes(self) -> int:
        """Memory of the copy, in bytes."""
        return self.copy.nbytes

    def __repr__(self) -> str:
        share = self.nbytes / self.head.weight.nbytes
        return (
            f"ScreenedHead({self.head.hidden_size}, {self.head.vocab_size}, bits={self.bits!r}, "
            f"copy of {self.nbytes / 2**20:.1f} MiB, {share:.0%} of the weight)"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the copy as safetensors, with its hash and that of the weight it belongs to."""
        self._check_fresh()
        store.save(path, self.copy, self._weight)

    @classmethod
    def load(cls, path: str | os.PathLike[str], head: Any) -> ScreenedHead:
        """Read a copy that `save` wrote.

        Raises:
            ValueError: the file is not such a copy, is damaged, or belongs to another weight.
        """
        _check_head(head)
        screened = cls.__new__(cls)
        screened._own(head, store.load(path, head.weight.detach()))
        return screened

    def attach(self) -> ScreenedHead:
        """Attach this copy to `head(hidden).argmax(-1)` and `.topk(k)`; return itself."""
        self.head.screened = self
        return self

    def fresh(self) -> bool:
        """Return whether the weight is unchanged since the copy was made."""
        return self._is_own_weight(self.head.weight)

    def _is_own_weight(self, weight: Tensor) -> bool:
        if self._pickled_hash is not None:
            self._attach_to_copied_weight()
        return _changes(weight) == self._version and _memory(weight) == _memory(self._weight)

    def _check_fresh(self) -> None:
        if not self.fresh():
            raise RuntimeError(
                "the weight of the head has changed since its copy was made; make another "
                "ScreenedHead"
            )

    # Answers --------------------------------------------------------------------------------------

    def argmax(self, hidden: Tensor) -> ScreenedArgmax:
        """Return the token of each hidden state (..., D): (...)."""
        _, ids, certificate = self._ask(hidden, 1)
        return ScreenedArgmax(ids[..., 0], certificate)

    def topk(self, hidden: Tensor, k: int) -> ScreenedTopK:
        """Return the k largest logits of hidden states (..., D) and their ids: (..., k) each."""
        checks.check_integer("k", k, low=1, high=self.head.vocab_size)
        return ScreenedTopK(*self._ask(hidden, k))

    @torch.no_grad()
    def sample(
        self,
        hidden: Tensor,
        sampler: Any,
        context: Any = None,
        position: Any = None,
        *,
        prompt_length: Any = None,
        context_mask: Tensor | None = None,
        exact: bool = False,
    ) -> ScreenedSample:
        """Return the token that `sampler` chooses for each hidden state (..., D).

        Equivalent to: sampler(head(hidden)).token

        Greedy, temperature, top_k, top_p, min_p, top_h and epsilon_cutoff, with penalties and
        biases, are decided from the bounds nearly always; other chains from the logits of all
        tokens, which the certificate says.

        Args:
            hidden: (..., D).
            sampler: the chain, the order and the seed.
            context: the ids so far, as in `Sampler`.
            position: of the token to come, as in `Sampler`.
            prompt_length: as in `Sampler`.
            context_mask: as in `Sampler`.
            exact: give the log-probabilities of all logits, for a sweep over the weight, not
                intervals.

        >>> from lmhead import LMHead, Sampler
        >>> head = LMHead(64, 1000)
        >>> hidden = torch.randn(3, 64)
        >>> sampler = Sampler(temperature=0.8, top_p=0.9, seed=1)
        >>> answer = ScreenedHead(head).sample(hidden, sampler)
        >>> torch.equal(answer.token, sampler(head(hidden)).token)
        True
        """
        self._check_fresh()
        if not hasattr(sampler, "sample_screened"):
            raise TypeError(f"sampler must be a Sampler; got {type(sampler).__name__}")
        found: ScreenedSample = sampler.sample_screened(
            self,
            self._source(hidden),
            hidden.shape[:-1],
            context,
            position,
            prompt_length=prompt_length,
            context_mask=context_mask,
            exact=exact,
        )
        return found

    def candidates(self, hidden: Tensor) -> Candidates:
        """Return approximate logits with bounds, for hidden states (B, D)."""
        source = self._source(hidden)
        if not (self.fits(source) and bool(usable(self.copy, source.hiddens[0]).all())):
            raise ValueError("hidden must be finite, norm below 1e30; scale must be above 0")
        return Candidates(self.copy, source, self.bias64(source.bias))

    def verify(self, hidden: Tensor, k: int = 1) -> Verification:
        """Compare argmax and top k with float64 over all tokens; slow.

        >>> from lmhead import LMHead
        >>> ScreenedHead(LMHead(32, 500)).verify(torch.randn(10, 32), k=5).disagreements
        0
        """
        checks.check_integer("k", k, low=1, high=self.head.vocab_size)
        source = self._source(hidden)
        values, ids, certificate = self._ask(hidden, k)
        first = self.argmax(hidden).token.reshape(-1)
        values, ids = values.reshape(-1, k), ids.reshape(-1, k)
        every = torch.arange(source.vocab)
        wrong = 0
        for row in range(source.rows):
            z = source.pairs(torch.full_like(every, row), every)
            true, order = z.sort(descending=True, stable=True)
            same = torch.equal(order[:k], ids[row]) and torch.equal(true[:k], values[row])
            wrong += not (same and int(first[row]) == int(order[0]))
        return Verification(source.rows, wrong, certificate)

    def _ask(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor, Certificate]:
        self._check_fresh()
        source = self._source(hidden)
        values, ids, certificate = self._decide(source, k)
        lead = hidden.shape[:-1]
        return values.reshape(*lead, k), ids.reshape(*lead, k), certificate.reshape(lead)

    def _source(self, hidden: Tensor) -> Source:
        head = self.head
        checks.check_hidden_and_weight(hidden, head.weight)
        checks.check_vector("bias", head.bias, head.weight)
        flat = hidden.detach().reshape(-1, hidden.shape[-1]).contiguous()
        bias = None if head.bias is None else head.bias.detach()
        pointwise = Pointwise.of(softcap=head.softcap, scale=head.scale)
        return Source((flat,), (head.weight.detach(),), bias, pointwise).keep_masked()

    def decide(self, source: Source, k: int) -> tuple[Tensor, Tensor] | None:
        """Return values (N, k) in float64 and ids (N, k) for lazy logits; None if unsupported.

        Works for any logits of this weight, even if the head's bias or map has changed.
        """
        plain = self.compatible_source(source)
        if plain is None or k < 1:
            return None
        values, ids, _ = self._decide(plain, k)
        return values, ids

    def compatible_source(self, source: Source) -> Source | None:
        """Return the source as this copy reads it; None if its weight is not the copied one."""
        if len(source.weights) != 1 or not self._is_own_weight(source.weights[0]):
            return None
        if not self.fits(source):
            return None
        hidden = source.hiddens[0].detach().contiguous()
        bias = None if source.bias is None else source.bias.detach()
        return Source((hidden,), (self._weight,), bias, source.pointwise)

    # Implementation ------------------------------------------------------------------------------

    def bias64(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias in float64, converted once."""
        if bias is None:
            return None
        known = self._bias
        version = _changes(bias)
        same = known is not None and known[0].data_ptr() == bias.data_ptr() and known[1] == version
        if known is None or version is None or not same:
            wide = bias.double().contiguous()
            fits = bool(((wide.abs() < 1e30) | (wide == -torch.inf)).all())
            known = self._bias = (bias, version, wide if fits else None)
        return known[2]

    def fits(self, source: Source) -> bool:
        """Return whether the bounds hold for this map and this bias."""
        biased = source.bias is not None
        return candidates.is_increasing(source.pointwise) and (
            not biased or self.bias64(source.bias) is not None
        )

    @torch.no_grad()
    def _decide(self, source: Source, k: int) -> tuple[Tensor, Tensor, Certificate]:
        rows = source.rows
        values = torch.empty(rows, k, dtype=torch.float64)
        ids = torch.empty(rows, k, dtype=torch.int64)
        rescored = torch.full((rows,), source.vocab)
        fell = torch.ones(rows, dtype=torch.bool)
        read = 0
        if self.fits(source):
            good = usable(self.copy, source.hiddens[0]).nonzero()[:, 0]
            for some in torch.split(good, STATES_PER_PASS) if len(good) else ():
                part = source if len(some) == rows else source.select(some)
                found = decide(Candidates(self.copy, part, self.bias64(source.bias)), k)
                done = some[found.decided]
                values[done], ids[done] = found.values, found.ids
                rescored[done], fell[done] = found.rescored[found.decided], False
                read += found.bytes_read
        dense = fell.nonzero()[:, 0]
        if len(dense):
            _, decisions = row_answers(Questions(source.select(dense), top_k=k))
            values[dense], ids[dense] = decisions.top_values, decisions.top_ids
            read += source.weights[0].nbytes
        certificate = Certificate(rescored, fell, read)
        self.report.add(certificate, self._weight.nbytes)
        return values, ids, certificate


def _memory(t: Tensor) -> tuple[Any, ...]:
    """Return what tells two tensors apart without reading them."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def _changes(t: Tensor) -> int | None:
    """Return torch's version counter; None in inference mode, where there is none."""
    return None if t.is_inference() else t._version


def _check_head(head: Any) -> None:
    if not hasattr(head, "low_rank_a") or not hasattr(head, "softcap"):
        raise TypeError(f"head must be an LMHead; got {type(head).__name__}")
    if head.low_rank_a is not None:
        raise ValueError("head must have no low-rank delta; merge it into the weight first")
    checks.check_memory("the head's weight", head.weight)
    if not checks.is_plain(head.weight):
        kind = type(head.weight).__name__ if not head.weight.is_neg() else "a negative view"
        raise ValueError(f"the head's weight must be a plain tensor in memory; got {kind}")
    if head.weight.device.type != "cpu":
        raise ValueError(f"head must be on the CPU; got {head.weight.device}")


def _check_calibration(calibration: Tensor, head: Any) -> None:
    if not isinstance(calibration, Tensor) or not calibration.is_floating_point():
        raise TypeError("calibration must be a floating tensor of hidden states")
    if calibration.shape[-1:] != (head.hidden_size,) or calibration.numel() == 0:
        raise ValueError(
            f"calibration must have shape (..., {head.hidden_size}), with at least one state; "
            f"got {tuple(calibration.shape)}"
        )
    if not bool(calibration.isfinite().all()):
        raise ValueError("calibration must be finite; it holds a NaN or an infinity")
