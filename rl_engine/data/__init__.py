"""Prompts (generated arithmetic, GSM8K, other JSONL files) and the offline demo model."""
