"""The semantic doctor: why rollout and train logprobs differ, from logged tokens alone (numpy and pyarrow only)."""
