"""`FusedLinearForPPO`: verl's fused linear layer for PPO, computed by lmhead."""

from __future__ import annotations

from torch import Tensor, nn

from lmhead.linear_query import query


class FusedLinearForPPO(nn.Module):
    """Log-probabilities and entropies of given tokens, with verl's arguments and results.

    Equivalent to: z = hidden_states @ vocab_weights.T / temperature, then
    z.log_softmax(-1).gather(-1, input_ids[..., None])[..., 0] and Categorical(logits=z).entropy()

    To use it in verl, put it in place of verl's class of the same name:

        import verl.utils.experimental.torch_functional as fused
        from lmhead.integrations.verl import FusedLinearForPPO

        fused.FusedLinearForPPO = FusedLinearForPPO

    Args:
        chunk_size: accepted as in verl; lmhead bounds its memory by `max_bytes`.
        max_bytes: bound on temporary memory; None for 128 MiB.

    >>> import torch
    >>> fused = FusedLinearForPPO()
    >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(50, 8)
    >>> log_probs, entropy = fused(hidden, weight, torch.randint(50, (2, 5)), temperature=0.7)
    >>> log_probs.shape, entropy.shape
    (torch.Size([2, 5]), torch.Size([2, 5]))
    """

    def __init__(self, chunk_size: int = 512, *, max_bytes: int | None = None) -> None:
        super().__init__()
        self.chunk_size, self.max_bytes = chunk_size, max_bytes

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float | Tensor = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return log_probs (...) and entropy (...), in float32, both differentiable.

        Args:
            hidden_states: (T, D) or (B, T, D).
            vocab_weights: (V, D).
            input_ids: (T,) or (B, T).
            temperature: divides the logits; a number, or one per position.
        """
        answers = query(
            hidden_states,
            vocab_weights,
            log_prob=input_ids,
            entropy=True,
            temperature=temperature,
            max_bytes=self.max_bytes,
        )
        return answers.log_prob, answers.entropy
