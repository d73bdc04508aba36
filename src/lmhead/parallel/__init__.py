"""The head on `torch.distributed`."""

from __future__ import annotations
