"""Proof of providers on this machine and on a run's real shapes. Imports nothing, so that help needs no torch."""
