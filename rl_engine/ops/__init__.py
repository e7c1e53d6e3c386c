"""Operators: ``ops/<operator>/`` holds the contract (docstring), ``reference.py`` (plain torch) and the providers."""

from rl_engine.ops.operators import OPERATORS, Operators, Route, UnknownProvider, uniform

__all__ = ["OPERATORS", "Operators", "Route", "UnknownProvider", "uniform"]
