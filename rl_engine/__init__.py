"""RL-Kernel: exactly on-policy reinforcement learning of language models."""

__version__ = "0.1.0"
