"""Damaged model files: every one must open or be refused with a `ModelError`, within limits."""
