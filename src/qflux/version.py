"""The version, kept in one place: the package's metadata."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    try:
        return version("qflux")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


VERSION = _installed()
