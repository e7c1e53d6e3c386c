"""Writes a token log as JSON lines or Parquet, in our own field names or another stack's."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from rl_engine.diagnose.log import TokenLog

# Field -> name, for stacks that log responses only (verl, trl) or whole rows (slime, nemo-rl, prime-rl).
NAMES: dict[str, dict[str, str]] = {
    "rlk": {"tokens": "tokens", "mask": "mask", "rollout": "rollout_logprobs", "train": "train_logprobs"},
    "verl": {"tokens": "responses", "mask": "response_mask", "rollout": "rollout_log_probs", "train": "old_log_probs"},
    "slime": {"tokens": "tokens", "mask": "loss_mask", "rollout": "rollout_log_probs", "train": "log_probs"},
    "trl": {
        "tokens": "completion_ids",
        "mask": "completion_mask",
        "rollout": "sampling_per_token_logps",
        "train": "old_per_token_logps",
    },
    "nemo-rl": {
        "tokens": "token_ids",
        "mask": "token_mask",
        "rollout": "generation_logprobs",
        "train": "prev_logprobs",
    },
    "prime-rl": {
        "tokens": "input_ids",
        "mask": "loss_mask",
        "rollout": "inference_logprobs",
        "train": "trainer_logprobs",
    },
}
RESPONSE_ONLY = ("verl", "trl")


def rows(log: TokenLog, form: str = "rlk") -> list[dict[str, object]]:
    """One dictionary per sample."""
    names = NAMES[form]
    samples, out = log.samples, []
    assert log.tokens is not None and samples.prompt_length is not None
    for i in range(log.sample_count):
        start, stop = int(log.offsets[i]), int(log.offsets[i + 1])
        prompt = int(samples.prompt_length[i])
        skip = prompt if form in RESPONSE_ONLY else 0
        part = slice(start + skip, stop)
        row: dict[str, object] = {
            names["tokens"]: log.tokens[part].tolist(),
            names["mask"]: log.mask[part].astype(int).tolist(),
            names["rollout"]: log.rollout[part].tolist(),
            names["train"]: log.train[part].tolist(),
        }
        if form == "slime":
            row["response_length"] = stop - start - prompt
            for key in ("mask", "rollout", "train"):
                row[names[key]] = row[names[key]][prompt:]  # type: ignore[index]
        elif form in ("verl", "trl"):
            row["prompts" if form == "verl" else "prompt_ids"] = log.tokens[start : start + prompt].tolist()
        else:
            row["prompt_length"] = prompt
        for name in ("temperature", "top_p", "top_k", "weight_version", "train_version", "cached_tokens", "batch_size",
                     "step", "advantage", "time", "loss"):  # fmt: skip
            column = getattr(samples, name)
            if column is not None:
                row[name] = column[i].item()
        if samples.engine is not None:
            row["engine"] = samples.engine_names[samples.engine[i]]
        if samples.rank is not None:
            row["rank"] = samples.rank_names[samples.rank[i]]
        if samples.stopped is not None:
            row["finish_reason"] = "stop" if samples.stopped[i] else "length"
        out.append(row)
    return out


def header(log: TokenLog) -> dict[str, object]:
    """The log's facts as the first line of a JSONL file."""
    facts = {name: value for name, value in vars(log.facts).items() if value is not None}
    return {"log": facts}


def write_jsonl(log: TokenLog, path: pathlib.Path, form: str = "rlk") -> None:
    """Write JSON lines with a header line."""
    lines = [json.dumps(header(log)), *(json.dumps(row) for row in rows(log, form))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_parquet(log: TokenLog, path: pathlib.Path, form: str = "rlk") -> None:
    """Write Parquet, one row per sample, fp32 logprobs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = rows(log, form)
    columns: dict[str, object] = {}
    for name in data[0]:
        values = [row[name] for row in data]
        if isinstance(values[0], list):
            kind = np.float32 if isinstance(values[0][0], float) else np.int64
            columns[name] = pa.array([np.asarray(value, kind) for value in values])
        else:
            columns[name] = pa.array(values)
    for name, value in header(log)["log"].items():  # type: ignore[union-attr]
        columns[name] = pa.array([value] * len(data))
    pq.write_table(pa.table(columns), path)
