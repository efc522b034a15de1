"""The `flexfloor:` configuration section: typed settings and their YAML reader."""

from flexfloor.config.model import ADMISSION_METHODS, ContradictionError, FlexFloorConfig
from flexfloor.config.sections import (
    EngineConfig,
    HistoryConfig,
    RateConfig,
    RolloutConfig,
    Section,
    SolverConfig,
    TailGuardConfig,
)
from flexfloor.config.yaml_file import config_from_mapping, load_config

__all__ = [
    "ADMISSION_METHODS",
    "ContradictionError",
    "EngineConfig",
    "FlexFloorConfig",
    "HistoryConfig",
    "RateConfig",
    "RolloutConfig",
    "Section",
    "SolverConfig",
    "TailGuardConfig",
    "config_from_mapping",
    "load_config",
]
