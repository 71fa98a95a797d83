"""Warnings that are shown once per process."""

import warnings

_shown: set[str] = set()


class BitwrightWarning(UserWarning):
    """Something works, but not as expected."""


class DataWarning(BitwrightWarning):
    """Calibration data that may not be representative."""


def warn_once(what: str, reason: str) -> None:
    """Warn about `what`, once per process."""
    if what not in _shown:
        _shown.add(what)
        warnings.warn(f"{what}: {reason}", BitwrightWarning, stacklevel=2)


def forget() -> None:
    """Show all warnings again."""
    _shown.clear()
