"""Exceptions and warnings of lmhead, beyond Python's `ValueError` and `TypeError`.

A user's mistake is a `ValueError` or a `TypeError` whose message names the argument, what it must
be and what it was. The classes below cover all other cases.
"""


class PerformanceWarning(UserWarning):
    """The result is right, but dense logits were built, with their cost in memory and time."""


class ModelError(ValueError):
    """A model cannot be opened: the message names the file or the name, and what to do about it."""
