"""Warnings that a user should see once, however often their cause comes back."""

import warnings

_given: set[str] = set()


class BitwrightWarning(UserWarning):
    """Something works, but not the way one would expect."""


class DataWarning(BitwrightWarning):
    """Calibration data that tells less than it seems to."""


def warn_once(what: str, reason: str) -> None:
    """Warn about `what`, unless that has been done in this process."""
    if what not in _given:
        _given.add(what)
        warnings.warn(f"{what}: {reason}", BitwrightWarning, stacklevel=2)


def forget() -> None:
    """Give every warning again when its cause comes back."""
    _given.clear()
