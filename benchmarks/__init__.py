"""Side-by-side benchmarks: consistency mode against what a user would run instead. ``python -m benchmarks --help``."""
