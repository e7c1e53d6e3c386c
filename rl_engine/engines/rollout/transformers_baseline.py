"""Speed of transformers' own ``generate`` on the same model, prompts and threads: the yardstick for native mode."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch


@dataclasses.dataclass(frozen=True)
class BaselineSpeed:
    """New tokens and seconds of one ``generate`` call after a short warm-up; padding after a stop is not counted."""

    tokens: int
    seconds: float


def measure(
    model_root: Path, prompts: list[list[int]], max_new_tokens: int, temperature: float, device: torch.device
) -> BaselineSpeed:
    """bf16, one padded batch, sampling, KV cache: what a user of transformers would write."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_root, dtype=torch.bfloat16)
    model.to(device).eval()
    stop = model.generation_config.eos_token_id
    stops = set(stop if isinstance(stop, list) else [stop])
    longest = max(len(prompt) for prompt in prompts)
    pad = min(stops - {None}, default=0)
    padding = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[pad] * n + prompt for n, prompt in zip(padding, prompts, strict=True)], device=device)
    mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding], device=device)
    options = {"attention_mask": mask, "do_sample": True, "temperature": temperature, "top_k": 0, "pad_token_id": pad}
    torch.manual_seed(0)
    with torch.no_grad():
        model.generate(ids, max_new_tokens=2, **options)
        _wait(device)
        started = time.perf_counter()
        out = model.generate(ids, max_new_tokens=max_new_tokens, **options)
        _wait(device)
        seconds = time.perf_counter() - started
    tokens = 0
    for row in out[:, longest:].tolist():
        ends = [position for position, token in enumerate(row) if token in stops]
        tokens += ends[0] + 1 if ends else len(row)
    return BaselineSpeed(tokens, seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
