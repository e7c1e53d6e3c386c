"""Rule rewards: the answer of a response against its reference."""
