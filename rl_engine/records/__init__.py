"""Typed evidence: what workers write into a run directory and checks read back."""
