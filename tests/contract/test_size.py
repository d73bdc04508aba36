"""More logits than a 32-bit number can count (pytorch/pytorch 85786)."""

import oracle
import torch
from compare import assert_close

from contract.implementations import Implementation, every_implementation

ROWS, VOCAB = 2**16, 2**15 + 3


@every_implementation(needs={"size"})
def test_more_than_two_to_the_31_logits(implementation: Implementation) -> None:
    """Four different hidden states, over and over; each has its own loss, also at the far end."""
    assert ROWS * VOCAB > 2**31
    states = torch.tensor([[-1.0], [0.25], [2.0], [7.0]])
    weight = torch.linspace(-1.0, 2.0, VOCAB)[:, None]
    ids = torch.tensor([VOCAB - 1, 0, VOCAB // 2, VOCAB - 1])
    truth = oracle.linear_cross_entropy(states, weight, ids, reduction="none")
    repeats = ROWS // 4
    loss = implementation.loss(
        states.repeat(repeats, 1), weight, ids.repeat(repeats), reduction="none"
    )
    assert_close(loss, torch.from_numpy(truth).repeat(repeats), rtol=1e-5)
