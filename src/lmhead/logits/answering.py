"""The questions that lazy logits answer, each from one sweep over the vocabulary.

In:  logits (..., V), or their lazy log_softmax or softmax; targets, ids, a number of words.
Out: a loss, log-probabilities, entries at ids, an argmax, a top-k, a sample.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmhead import checks
from lmhead.functional import Answers, TopK, ask, cross_entropy
from lmhead.logits.unbuilt import Kind, Unbuilt
from lmhead.sweep import Questions, row_answers
from lmhead.sweep.draw import draw, log_sums
from lmhead.sweep.eager import eager

if TYPE_CHECKING:
    from typing_extensions import Self


class Answering(Unbuilt):
    """The part of `LazyLogits` that computes."""

    # Softmax -------------------------------------------------------------------------------------

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> Any:
        """Lazy log-probabilities."""
        return self._normalized("log_probs", "log_softmax", dim, dtype)

    def softmax(self, dim: int, dtype: torch.dtype | None = None) -> Any:
        """Lazy probabilities."""
        return self._normalized("probs", "softmax", dim, dtype)

    def _normalized(self, kind: Kind, name: str, dim: int, dtype: torch.dtype | None) -> Any:
        if self._kind == "probs" or not self._is_last(dim):
            return getattr(self._build(f"{name}({dim})"), name)(dim, dtype=dtype)
        return self._with(kind=kind, dtype=dtype or self.dtype, row_shift=None)

    def exp(self) -> Any:
        """Lazy probabilities, from lazy log-probabilities."""
        return self._with(kind="probs") if self._kind == "log_probs" else self._build("exp()").exp()

    def log(self) -> Any:
        """Lazy log-probabilities, from lazy probabilities."""
        return self._with(kind="log_probs") if self._kind == "probs" else self._build("log()").log()

    def _is_last(self, dim: int) -> bool:
        return dim in (-1, self.ndim - 1)

    # Questions ----------------------------------------------------------------------------------

    @eager
    def ask(self, **questions: Any) -> Answers:
        """`lmhead.query` on these logits: the same questions, the same answers.

        >>> from lmhead import LMHead
        >>> logits = LMHead(16, 100)(torch.randn(4, 16))
        >>> answers = logits.ask(entropy=True, top_k=5)
        >>> answers.entropy.shape, answers.top_k.indices.shape
        (torch.Size([4]), torch.Size([4, 5]))
        """
        kl_to = questions.pop("kl_to", None)
        if kl_to is not None:
            kl_to = kl_to.source()
        return ask(
            self.source(),
            self._lead,
            self.dtype,
            kl_to=kl_to,
            max_bytes=questions.pop("max_bytes", self._max_bytes),
            **questions,
        )

    @eager
    def cross_entropy(self, targets: Tensor, **options: Any) -> Tensor:
        """`F.cross_entropy` of these logits, which must be (N, V) or (V,); float64."""
        return cross_entropy(
            self.source(),
            self._lead,
            targets,
            grad_filter=self._grad_filter,
            max_bytes=self._max_bytes,
            **options,
        )

    @eager
    def _raw_lse(self, *, keepdim: bool = False) -> Tensor:
        """Log Σ exp of the unshifted logits, in float64."""
        answers, _ = row_answers(Questions(self.source(), max_bytes=self._max_bytes))
        assert answers.lse is not None
        return answers.lse.reshape((*self._lead, 1) if keepdim else self._lead)

    def logsumexp(self, dim: int, keepdim: bool = False) -> Tensor:
        """Log Σ_v exp z_v, (...)."""
        if not self._is_last(dim) or self._kind == "probs":
            return self._build(f"logsumexp({dim})").logsumexp(dim, keepdim)
        lse = self._raw_lse(keepdim=keepdim)
        return (torch.zeros_like(lse) if self._kind == "log_probs" else self._shift(lse)).to(
            self.dtype
        )

    # Chosen words --------------------------------------------------------------------------------

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """Entries at given ids, (..., K)."""
        if not self._is_last(dim) or index.shape[:-1] != self._lead:
            return self._build(f"gather({dim})").gather(dim, index)
        return self._gather(index)

    @eager
    def _gather(self, index: Tensor) -> Tensor:
        checks.check_ids("index", index, self.shape[-1])
        ids = index.reshape(-1, index.shape[-1]).long()
        questions = Questions(
            self.source(), ids=ids, grad_filter=self._grad_filter, max_bytes=self._max_bytes
        )
        answers, _ = row_answers(questions)
        assert answers.picked is not None
        assert answers.lse is not None
        z = answers.picked
        if self._kind == "logits":
            return self._shift(z.reshape(index.shape)).to(self.dtype)
        log_p = (z - answers.lse[:, None]).reshape(index.shape)
        return (log_p if self._kind == "log_probs" else log_p.exp()).to(self.dtype)

    def columns(self, ids: Tensor) -> Tensor:
        """Only the words `ids` (K,): computes K rows of the weight, gives (..., K)."""
        bias = None if self._bias is None else self._bias[ids]
        chosen = self._with(weights=tuple(w[ids] for w in self._weights), bias=bias)
        z = chosen.source().dense().reshape(chosen.shape)
        if self._kind == "logits":
            return self._shift(z).to(self.dtype)
        log_p = z - self._raw_lse(keepdim=True).to(z.dtype)
        return (log_p if self._kind == "log_probs" else log_p.exp()).to(self.dtype)

    def take_words(self, words: slice) -> Self | Tensor:
        """A range of words: lazy logits on a part of the weight; probabilities are computed."""
        if self._kind != "logits":
            return self.columns(torch.arange(self.shape[-1], device=self.device)[words])
        bias = None if self._bias is None else self._bias[words]
        return self._with(weights=tuple(w[words] for w in self._weights), bias=bias)

    # The best words, and a draw ------------------------------------------------------------------

    @eager
    def _screened(self, k: int) -> TopK | None:
        """The k best words by way of the head's screen, if it has one that can serve."""
        if self._screen is None or self.requires_grad or not 0 < k <= self.shape[-1]:
            return None
        if torch._C._are_functorch_transforms_active():
            return None
        decided = self._screen.decide(self.source(), k)
        if decided is None:
            return None
        values, ids = (t.reshape(*self._lead, k) for t in decided)
        return TopK(values.to(self.dtype), ids)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The id of the largest logit: no softmax is needed, which keeps the order."""
        if dim is None or not self._is_last(dim):
            return self._build(f"argmax({dim})").argmax(dim, keepdim)
        screened = self._screened(1)
        best = self.ask(argmax=True).argmax if screened is None else screened.indices[..., 0]
        assert best is not None
        return best.unsqueeze(-1) if keepdim else best

    def topk(
        self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> TopK | torch.return_types.topk:
        """The k largest entries and their ids, (..., k) each."""
        if not self._is_last(dim) or not largest:
            return self._build("topk()").topk(k, dim, largest, sorted)
        top = self._screened(k)
        if top is None:
            top = self.ask(top_k=k).top_k
        if top is None:  # k = 0
            empty = torch.empty(*self._lead, 0, device=self.device)
            return TopK(empty.to(self.dtype), empty.long())
        if self.requires_grad or self._kind != "logits":
            # No token where there is none to choose: gather must not see its -1.
            values = self.gather(-1, top.indices.clamp(min=0))
            values = torch.where(top.indices < 0, top.values, values)
        else:
            values = self._shift(top.values)
        return TopK(values, top.indices)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """The largest entry and its id."""
        if dim is None or not self._is_last(dim):
            dense = self._build(f"max({dim})")
            return dense.max() if dim is None else dense.max(dim, keepdim)
        values, indices = self.topk(1)
        return TopK(values, indices) if keepdim else TopK(values[..., 0], indices[..., 0])

    @eager
    def multinomial(
        self,
        num_samples: int,
        replacement: bool = False,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Ids drawn from lazy probabilities, (..., num_samples)."""
        if self._kind != "probs" or (num_samples > 1 and not replacement):
            return self._build("multinomial()").multinomial(
                num_samples, replacement, generator=generator
            )
        return self._draw(num_samples, generator)

    def _draw(self, num_samples: int, generator: torch.Generator | None) -> Tensor:
        """Independent draws from every row, (..., num_samples)."""
        with torch.no_grad():
            questions = Questions(self.source(), max_bytes=self._max_bytes)
            lse = log_sums(questions)
            if bool(lse.isnan().any() | (lse == -math.inf).any()):
                raise ValueError("probs must have a finite, positive sum in every row")
            uniforms = torch.rand(
                len(lse), num_samples, dtype=torch.float64, device=self.device, generator=generator
            )
            drawn = draw(questions, lse, uniforms)
        return drawn.reshape(*self._lead, num_samples)
