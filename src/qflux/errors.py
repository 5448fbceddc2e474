"""Errors a user can act on.

Every `QfluxError` says what happened, shows the offending value where there is one, and names a remedy. The command
line prints it without a traceback and exits with code 2; anything else is a bug and exits with code 1.
"""

from __future__ import annotations

import re
import reprlib


class QfluxError(Exception):
    """Base of all errors caused by input rather than by a bug.

    Args:
        problem: what happened, in one sentence.
        remedy: what the user can do about it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem = problem
        self.remedy = remedy
        self.headline = problem.split("\n", 1)[0]
        """The problem on one line, without a list of details."""
        super().__init__(f"{problem}\n  → {remedy}" if remedy else problem)


class Interrupted(Exception):  # noqa: N818  (nothing went wrong)
    """The user stopped a run; what was done is saved."""


class ConfigError(QfluxError):
    """The configuration is wrong."""


class DataError(QfluxError):
    """A data set, an image or a prompt is wrong."""


class CacheError(QfluxError):
    """The embedding cache is incomplete or damaged."""


class CheckpointError(QfluxError):
    """A checkpoint, an adapter or a model folder can't be used."""


LONGEST = 200
"""Characters of somebody's value that a message repeats."""
_SHORTENED = reprlib.Repr()
_SHORTENED.maxstring = _SHORTENED.maxother = LONGEST
_SHORTENED.maxlong, _SHORTENED.maxlist, _SHORTENED.maxdict, _SHORTENED.maxlevel = 60, 8, 8, 3


def cut(value: object) -> str:
    """A value as a message shows it: shortened if it is long. It may be a megabyte, or hold itself."""
    text = _SHORTENED.repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


_SECRETS = (
    (re.compile(r"(://)[^/\s]+@"), r"\1***@"),
    (re.compile(r"([?&;](?:[\w-]*(?:token|key|secret|password|signature)|sig|auth)=)[^&\s'\"]+", re.I), r"\1***"),
    (re.compile(r"\b(hf_|sk-|gh[po]_|github_pat_|glpat-)[A-Za-z0-9]{20,}"), r"\1***"),
)
"""What stands before a host, tokens in a query, tokens by the way they begin; no name that a person would choose."""


def redacted(text: str) -> str:
    """A text without the secrets that addresses in it may hold."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def collected(kind: type[QfluxError], headline: str, problems: list[str], remedy: str = "") -> QfluxError:
    """One error that reports every problem found, not only the first."""
    shown = problems[:20]
    lines = [f"{headline} ({len(problems)} problem{'s' if len(problems) != 1 else ''}):"]
    lines += [f"  - {problem}" for problem in shown]
    if len(problems) > len(shown):
        lines.append(f"  - … and {len(problems) - len(shown)} more")
    error = kind("\n".join(lines), remedy)
    error.headline = headline
    return error
