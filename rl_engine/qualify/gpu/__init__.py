"""Proof of the GPU's providers: candidates held against the anchor's bits on real shapes, timed, the fastest kept."""
