"""The configuration: one frozen dataclass, its rules, and where its values come from."""

from lightning_smp.config.schema import KEYS, SMPConfig
from lightning_smp.config.sources import UNSET, resolve_config

__all__ = ["KEYS", "UNSET", "SMPConfig", "resolve_config"]
