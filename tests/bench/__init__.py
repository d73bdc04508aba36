"""Tests of the benchmarks' machinery, with shapes so small that the times mean nothing."""
