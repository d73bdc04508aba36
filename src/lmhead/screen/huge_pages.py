"""Memory of large copies in huge pages, where the system has them: a pass over it is faster.

One hidden state reads the whole copy once. With pages of 4 KiB the processor looks up the page
table all the time; on a virtual machine that costs up to half of the speed. A copy that is mapped
from a file stays where it is: moving it cost as much as 80 passes gained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmhead.sweep import kernels

LARGE = 4 << 20
"""Bytes from which on a tensor holds at least one huge page, wherever it begins."""


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return new memory as `torch.empty` does, in huge pages if it is large."""
    new = torch.empty(*shape, dtype=dtype)
    core = kernels.core_with("advise_huge_pages")
    if core is not None and new.nbytes >= LARGE:
        core.advise_huge_pages(new.view(-1).view(torch.uint8))
    return new
