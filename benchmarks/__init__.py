"""Benchmarks of lmhead: speed, memory and errors compared with the alternatives. See README.md.

Read first: `task`, `loss`, `query` (what is compared), `inputs`, `float64_reference`, `timing` (the
interleaved rounds), `comparison`, `fresh_process` (memory), `runner`, `report`.
"""
