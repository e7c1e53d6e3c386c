"""The shape of a decoder, as every part of it takes it. It is read in ``rl_engine.families``."""

from rl_engine.families.config import ModelConfig, RopeScaling, parse_config, read_config
from rl_engine.families.refusal import UnsupportedModel

__all__ = ["ModelConfig", "RopeScaling", "UnsupportedModel", "parse_config", "read_config"]
