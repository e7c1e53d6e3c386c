"""A small, complete and valid run directory, made without an engine, for tests of records and checks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from rl_engine.config.plan import (
    DataPlan,
    LossPlan,
    OptimizerPlan,
    Plan,
    ProviderPlan,
    SamplingPlan,
    Topology,
)
from rl_engine.numerics.digest import tensor_digest
from rl_engine.records.codec import canonical_digest, encode
from rl_engine.records.environment import collect_environment
from rl_engine.records.statistics import summarise
from rl_engine.records.types import (
    PassRecord,
    RetainedSets,
    RouteRecord,
    SampleBatch,
    SampleRecord,
    SourceRecord,
    StepRecord,
    StepSeconds,
    ThreadSettings,
)
from rl_engine.records.writer import RunWriter

OPERATORS = ("adamw", "linear", "qk_norm", "rms_norm", "sample", "selected_logp")
CALLED = {"train": ("adamw", "linear", "rms_norm", "selected_logp"), "rollout": OPERATORS[1:2] + OPERATORS[3:]}
VOCAB = 100
CAP = 5


def make_plan(run_dir: Path, mode: str = "consistency", **changes: object) -> Plan:
    """A plan of 2 steps, 2 prompts of 2 samples each, one trainer rank and one rollout rank."""
    provider = "stock" if mode == "native" else "cpu"
    providers = tuple((operator, provider) for operator in OPERATORS)
    plan = Plan(
        schema_version="rlkernel.plan.v1",
        profile="test",
        mode=mode,
        backend="cpu",
        stack="builtin",
        run_id=run_dir.name,
        run_dir=str(run_dir),
        model_root="model",
        python="python",
        rollouts=2,
        seed=1,
        global_batch_size=4,
        max_tokens_per_gpu=64,
        fold_tokens=4096,
        threads=1,
        require_updates=True,
        gradients="deterministic",
        contract_id="rlk.v1/cpu",
        contract_digest="c" * 64,
        evidence="formal",
        topology=Topology(train_tp=1, train_cp=1, rollout_tp=1, rollout_cp=1, rollout_engines=1),
        sampling=SamplingPlan(temperature=1.0, top_p=0.9, top_k=-1, max_response_len=CAP, rollout_seed=1),
        optimizer=OptimizerPlan(lr=1e-5, weight_decay=0.1, beta1=0.9, beta2=0.98, eps=1e-8, clip_grad=1.0),
        loss=LossPlan(kl_coef=0.0, std_normalization=True, advantage_eps=1e-6, clip_low=0.2, clip_high=0.2),
        data=DataPlan(source="arithmetic", path=None, prompts_per_step=2, samples_per_prompt=2, seed=1),
        providers=ProviderPlan(train=providers, rollout=providers),
    )
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def make_batch(step: int, mode: str = "consistency") -> SampleBatch:
    """Four ragged samples (responses of 3, 5, 1 and 4 tokens) with retained sets on response tokens."""
    rng = np.random.default_rng(step)
    prompts, responses = (4, 4, 2, 2), (3, 5, 1, 4)
    lengths = [p + r for p, r in zip(prompts, responses, strict=True)]
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    total = int(offsets[-1])
    tokens = rng.integers(0, VOCAB, total).astype(np.int32)
    mask = np.zeros(total, dtype=np.uint8)
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        start = int(offsets[index])
        group_start = int(offsets[index - index % 2])
        tokens[start : start + prompt] = tokens[group_start : group_start + prompt]
        mask[start + prompt : start + prompt + response] = 1
    rollout = np.where(mask == 1, -rng.random(total), 0).astype(np.float32)
    train = rollout.copy()
    if mode == "native":
        train[mask == 1] = np.nextafter(train[mask == 1], np.float32(-9), dtype=np.float32)
    return SampleBatch(
        tokens=tokens,
        offsets=offsets,
        loss_mask=mask,
        rollout_logprob=rollout,
        train_logprob=train,
        samples=tuple(_sample(step, index, responses[index]) for index in range(4)),
        retained=_retained(tokens, mask, rng),
    )


def make_step(step: int, batch: SampleBatch) -> StepRecord:
    """The step record that follows from a batch."""
    norm = 0.5 + step
    return StepRecord(
        step=step,
        weight_version=step,
        **dataclasses.asdict(summarise(batch)),
        entropy_mean=1.5,
        loss=0.1,
        clip_fraction=0.0,
        grad_norm=norm,
        grad_norm_hex=norm.hex(),
        seconds=StepSeconds(1.0, 0.1, 0.5, 1.0, 0.2, 0.1, 0.0),
        train_tokens_per_s=100.0,
        rollout_tokens_per_gpu_s=50.0,
        score_calls=1,
        score_tokens=int(np.count_nonzero(batch.loss_mask)),
        ratio_mismatches=0,
    )


def make_run(run_dir: Path, mode: str = "consistency", killed_after: int = 0, **plan_changes: object) -> Path:
    """Write the whole run, finished but neither validated nor sealed, and return its directory.

    ``killed_after``: so many steps are of a first attempt that ended without a word.
    """
    plan = make_plan(run_dir, mode, **plan_changes)
    body = encode(plan)
    writer = RunWriter.create(run_dir, body, canonical_digest(body))
    source = SourceRecord(name="rl_kernel", revision="a" * 40, dirty=False, diff_hash=None)
    workers = (("driver", "driver"), ("train", "trainer"), ("rollout", "engine0"))
    _environments(writer, plan, "start", workers, source)
    writer.state("running")
    first = 0
    for version in range(plan.rollouts + 1):
        weight = np.arange(6, dtype=np.float32) + version
        digest = writer.weights(version, {"layer.weight": tensor_digest("layer.weight", weight)})
        for role, engine in workers[1:]:
            del role
            writer.event("weights_loaded", engine=engine, rank=0, version=version, digest=digest)
        if version < plan.rollouts:
            batch = make_batch(version, mode)
            writer.samples(version, batch)
            _passes(writer, version, batch, first)
            first += 5
            if version + 1 in (killed_after, plan.rollouts):
                _routes(writer, plan, workers)
            writer.step(make_step(version, batch))
            writer.log(f"step {version} done")
            if version + 1 == killed_after:
                writer.close()
                writer, first = RunWriter.take_over(run_dir), 0
                _environments(writer, plan, "start", workers, source)
                writer.state("running")
    _environments(writer, plan, "end", workers, source)
    writer.state("finished")
    return run_dir


def _passes(writer: RunWriter, step: int, batch: SampleBatch, first: int) -> None:
    """All prompts in one pass, the last sample back in the queue and in again, then a token each to the end."""
    a, b, c, d = ((sample.prompt_index, sample.sample_index) for sample in batch.samples)

    def line(at: int, samples: int, tokens: int, **changes: object) -> PassRecord:
        record = PassRecord(step, step, first + at, 1, samples, 0, tokens, 0, 0, 0, (), (), (), 8, 5, "eager")
        return dataclasses.replace(record, **changes)  # type: ignore[arg-type]

    writer.passes(
        "engine0",
        [
            line(0, 4, 10, prefill=10, shared=2, admitted=(a, b, c, d), finished=(c,)),
            line(1, 2, 2, waiting=1, discarded=2, preempted=(d,)),
            line(2, 3, 5, prefill=3, admitted=(d,), finished=(a,)),
            line(3, 2, 2, passes=2, finished=(b, d)),
        ],
    )


def _routes(writer: RunWriter, plan: Plan, workers: tuple[tuple[str, str], ...]) -> None:
    calls = max(7, plan.rollouts)
    for side, engine in workers[1:]:
        pairs = plan.providers.train if side == "train" else plan.providers.rollout
        routes = [
            RouteRecord(side, name, provider, "bfloat16", "eager", calls, {"T<=64": calls})  # type: ignore[arg-type]
            for name, provider in pairs
            if name in CALLED[side]
        ]
        writer.routes(engine, 0, routes)


def _environments(
    writer: RunWriter, plan: Plan, phase: str, workers: tuple[tuple[str, str], ...], source: SourceRecord
) -> None:
    for role, engine in workers:
        record = collect_environment(
            phase=phase,  # type: ignore[arg-type]
            role=role,  # type: ignore[arg-type]
            engine=engine,
            rank=0,
            device="cpu",
            contract_id=plan.contract_id,
            contract_digest=plan.contract_digest,
            qualification_digest="d" * 64,
            threads=None if role == "driver" else ThreadSettings(intra_op=plan.threads, inter_op=1, omp=plan.threads),
            sources=(source,),
        )
        writer.environment(record)


def _sample(step: int, index: int, response: int) -> SampleRecord:
    return SampleRecord(
        prompt_index=2 * step + index // 2,
        sample_index=index % 2,
        seed=100 * step + index,
        weight_version=step,
        engine="engine0",
        text="the answer is 7",
        reward=float(index % 2),
        answer="7" if index % 2 else None,
        finish_reason="length" if response == CAP else "stop",
    )


def _retained(tokens: np.ndarray, mask: np.ndarray, rng: np.random.Generator) -> RetainedSets:
    rows = []
    for token, masked in zip(tokens.tolist(), mask.tolist(), strict=True):
        # A bitmask of 100 ids takes 13 bytes: sets of up to 3 ids are smaller as ids.
        size = int(rng.choice([1, 2, 30, 60])) if masked else 0
        chosen = set(rng.choice(VOCAB, size, replace=False).tolist()) | ({token} if masked else set())
        rows.append(np.array(sorted(chosen), dtype=np.int32))
    offsets = np.cumsum([0, *(row.size for row in rows)]).astype(np.int64)
    return RetainedSets(offsets=offsets, ids=np.concatenate(rows), vocab=VOCAB)
