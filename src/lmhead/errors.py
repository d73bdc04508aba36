"""What lmhead raises and warns of, beyond Python's own `ValueError` and `TypeError`.

A user's mistake is a `ValueError` or a `TypeError` whose message names the argument, what it must
be and what it was. The classes here are for the rest.
"""


class PerformanceWarning(UserWarning):
    """The answer is right, but it took the memory or the time that lmhead exists to save."""


class ModelError(ValueError):
    """A model cannot be opened: the message names the file or the name, and what to do about it."""
