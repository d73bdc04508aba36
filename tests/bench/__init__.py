"""Tests of the benchmarks, with shapes so small that the times mean nothing."""
