"""Sampling: against Hugging Face's processors, the textbook, and the bugs that others had."""
