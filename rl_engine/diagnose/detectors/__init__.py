"""Fingerprints. Each detector is ``detect(...) -> list[Evidence]`` and looks for one family of causes."""
