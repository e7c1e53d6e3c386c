"""Proof of providers on this machine and on a run's real shapes."""

from rl_engine.qualify.proof import Case, Qualification, prove

__all__ = ["Case", "Qualification", "prove"]
