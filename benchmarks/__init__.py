"""The standard set of benchmarks, its goals, and scripts; the machinery is `lmhead.bench`."""
