"""The whole configuration, validated before anything is loaded.

A config file is YAML. `load_config` reads it, applies `path.to.key=value` overrides, accepts the `class_path` /
`init_args` nesting of older files, and reports every problem at once, with its path, its value and what would be right.
"""

from qflux.config.data import (
    CacheSource,
    Candidates,
    CsvSource,
    DataSettings,
    FolderSource,
    HubColumns,
    HubSource,
    JsonlSource,
    ProcessorSettings,
    Source,
    TableColumns,
)
from qflux.config.loss import LossSettings, TimestepSettings
from qflux.config.model import LoraSettings, ModelSettings
from qflux.config.reader import load_config
from qflux.config.root import Config
from qflux.config.sampling import ValidationSettings
from qflux.config.section import STEP, Section
from qflux.config.training import EmaSettings, OptimizerSettings, TrainSettings

__all__ = [
    "STEP",
    "CacheSource",
    "Candidates",
    "Config",
    "CsvSource",
    "DataSettings",
    "EmaSettings",
    "FolderSource",
    "HubColumns",
    "HubSource",
    "JsonlSource",
    "LoraSettings",
    "LossSettings",
    "ModelSettings",
    "OptimizerSettings",
    "ProcessorSettings",
    "Section",
    "Source",
    "TableColumns",
    "TimestepSettings",
    "TrainSettings",
    "ValidationSettings",
    "load_config",
]
