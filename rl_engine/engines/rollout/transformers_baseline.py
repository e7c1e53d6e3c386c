"""Speed of transformers' own ``generate`` on the same model, prompts and threads: the yardstick for native mode."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class BaselineSpeed:
    """New tokens and seconds of one ``generate`` call after a short warm-up; padding after a stop is not counted."""

    tokens: int
    seconds: float


def measure(model_root: Path, prompts: list[list[int]], max_new_tokens: int, temperature: float) -> BaselineSpeed:
    """bf16, one padded batch, sampling, KV cache: what a user of transformers would write."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_root, dtype=torch.bfloat16)
    model.eval()
    stop = model.generation_config.eos_token_id
    stops = set(stop if isinstance(stop, list) else [stop])
    longest = max(len(prompt) for prompt in prompts)
    pad = min(stops - {None}, default=0)
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"attention_mask": mask, "do_sample": True, "temperature": temperature, "top_k": 0, "pad_token_id": pad}
    torch.manual_seed(0)
    with torch.no_grad():
        model.generate(ids, max_new_tokens=2, **options)
        started = time.perf_counter()
        out = model.generate(ids, max_new_tokens=max_new_tokens, **options)
        seconds = time.perf_counter() - started
    tokens = 0
    for row in out[:, longest:].tolist():
        ends = [position for position, token in enumerate(row) if token in stops]
        tokens += ends[0] + 1 if ends else len(row)
    return BaselineSpeed(tokens, seconds)
