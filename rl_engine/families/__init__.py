"""Which Hugging Face checkpoints the decoder computes: the one reader of ``config.json`` and of tensor headers.

What a checkpoint asks for and the decoder does not compute is refused by name; so is every key and every tensor that
nothing here reads. No torch is imported, so that ``plan`` and ``doctor`` say it before anything starts.
"""
