"""Settings: `table` defines them, `kinds` their types, `file` reads TOML, and `environment`, the
only reader of the environment, merges flags, variables, file and defaults.
"""

from dflash_protocol.settings.environment import (
    bare_environment,
    cache_directory,
    cache_folder,
    child_environment,
    daemon_environment,
    keys_directory,
    lm_studio_folders,
    load_settings,
    ollama_folders,
    package_roots,
    run_directory,
    state_directory,
    supervision,
    wants_plain_text,
)
from dflash_protocol.settings.kinds import DaemonSetting
from dflash_protocol.settings.table import AUTO_TIER, CPU_TIERS, MAX_THREADS, VARIABLES, Settings

__all__ = [
    "AUTO_TIER",
    "CPU_TIERS",
    "MAX_THREADS",
    "VARIABLES",
    "DaemonSetting",
    "Settings",
    "bare_environment",
    "cache_directory",
    "cache_folder",
    "child_environment",
    "daemon_environment",
    "keys_directory",
    "lm_studio_folders",
    "load_settings",
    "ollama_folders",
    "package_roots",
    "run_directory",
    "state_directory",
    "supervision",
    "wants_plain_text",
]
