"""Makes the generated pages of docs/: ``python -m tools.docs``."""
