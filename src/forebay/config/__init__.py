"""The configuration of a run: a TOML file or a preset, with overrides, as frozen dataclasses that are validated.

`forebay.config.sections` has the keys, `forebay.config.loading` reads them, `forebay.config.checks` refuses combinations, and
`forebay.config.fast_path` gives the keys that are "auto" their values.
"""

from forebay.config.checks import check_experts, check_world, divisors, listed, split_replicas
from forebay.config.fast_path import Facts, FastPath, is_open, resolve, shares_weights, why_called
from forebay.config.loading import apply_override, build_section, from_mapping, load, presets
from forebay.config.sections import (
    MOST_PROCESSES,
    SCHEDULES,
    Config,
    Data,
    DataSource,
    Device,
    Log,
    Model,
    Parallel,
    Schedule,
    Train,
    key,
    parse_duration,
    stages_of,
    wrong_stage,
)

__all__ = [
    "MOST_PROCESSES",
    "SCHEDULES",
    "Config",
    "Data",
    "DataSource",
    "Device",
    "Facts",
    "FastPath",
    "Log",
    "Model",
    "Parallel",
    "Schedule",
    "Train",
    "apply_override",
    "build_section",
    "check_experts",
    "check_world",
    "divisors",
    "from_mapping",
    "is_open",
    "key",
    "listed",
    "load",
    "parse_duration",
    "presets",
    "resolve",
    "shares_weights",
    "split_replicas",
    "stages_of",
    "why_called",
    "wrong_stage",
]
