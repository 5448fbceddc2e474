"""Classes that a config names, `package.module.Class`: the one place that imports what somebody asks for."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from qflux.errors import ConfigError


def load_class(setting: str, class_path: str, remedy: str) -> Any:
    """What `setting` names, which should be a class; a `ConfigError` if there is nothing of that name."""
    module_name, _, class_name = class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{setting}: {class_path} can't be imported: {error}", remedy) from None
    return found


def make(section: str, kind: type[Any], arguments: Mapping[str, Any], *first: Any) -> Any:
    """An instance of a class with the arguments of a config, behind those of the program."""
    try:
        return kind(*first, **arguments)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        known = list(inspect.signature(kind).parameters)[len(first) :]
        takes = f"{kind.__name__} takes {', '.join(known)}." if known else f"{kind.__name__} takes no arguments."
        raise ConfigError(f"{section}.init_args: {error}", takes) from None
