import pytest
import torch
from torch import Tensor

from vocab.adaptive_heads import DIM


@pytest.fixture
def hidden() -> Tensor:
    made = torch.randn(13, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return made * torch.linspace(0.1, 3.0, 13, dtype=torch.float64)[:, None]
