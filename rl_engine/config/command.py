"""What a plan becomes outside this process: engine arguments, environment and the submitted command."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from rl_engine.config.engines import HERE
from rl_engine.config.plan import Plan


@dataclasses.dataclass(frozen=True)
class Submission:
    """The command of a run, with the variables it adds to its environment."""

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


def submission(plan: Plan, given: Sequence[str] = ()) -> Submission:
    """The command and environment of ``plan``.

    An external runner gets its own flags; the built-in stack runs the launcher itself with the arguments ``given`` on
    the command line, so that the printed line makes this very plan again.
    """
    paths = dict(plan.paths)
    if plan.stack != "vime":
        entry = ("-m", "rl_engine.entrypoints.repro", "run")
        local = (plan.python, *entry, *given, "--run-id", plan.pair_id or plan.run_id)
        return Submission(local, tuple(sorted(_environment(plan, paths).items())))
    command = (plan.python, os.path.join(paths.get("vime_root", ""), "train.py"), *_vime_arguments(plan, paths))
    return Submission(command, tuple(sorted(_environment(plan, paths).items())))


def _environment(plan: Plan, paths: Mapping[str, str]) -> dict[str, str]:
    env = {
        "RL_KERNEL_PLAN": os.path.join(plan.run_dir, "plan.json"),
        "OMP_NUM_THREADS": str(plan.threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if plan.stack in HERE:
        return env
    first = [paths[name] for name in ("te_root", "cuda_python_site") if name in paths]
    first += [paths[name] for name in ("rl_kernel_root", "vime_root", "megatron_root") if name in paths]
    if plan.backend == "rocm" and "vllm_root" in paths:
        first.append(paths["vllm_root"])
    env["PYTHONPATH"] = os.pathsep.join(first)
    if plan.backend == "cuda" and "cuda_runtime_root" in paths:
        lib = os.path.join(paths["cuda_runtime_root"], "lib")
        env["CUDNN_FRONTEND_CUDART_LIB_NAME"] = os.path.join(lib, "libcudart.so.12")
        env["LD_LIBRARY_PATH"] = lib
    return env


def _vime_arguments(plan: Plan, paths: Mapping[str, str]) -> tuple[str, ...]:
    """Flags of the external runner, in groups; each value stands in the plan once."""
    shape, sampling, optimizer, loss = plan.topology, plan.sampling, plan.optimizer, plan.loss
    ranks = shape.train_tp * shape.train_cp
    pairs: list[tuple[str, object]] = [
        ("--actor-num-nodes", 1),
        ("--actor-num-gpus-per-node", ranks),
        ("--hf-checkpoint", plan.model_root),
        ("--ref-load", paths.get("ref_load", "")),
        ("--prompt-data", plan.data.path or ""),
        ("--input-key", "prompt"),
        ("--label-key", "label"),
        ("--num-rollout", plan.rollouts),
        ("--rollout-seed", sampling.rollout_seed),
        ("--seed", plan.seed),
        ("--rollout-batch-size", plan.data.prompts_per_step),
        ("--n-samples-per-prompt", plan.data.samples_per_prompt),
        ("--global-batch-size", plan.global_batch_size),
        ("--rollout-max-response-len", sampling.max_response_len),
        ("--rollout-temperature", sampling.temperature),
        ("--rollout-top-p", sampling.top_p),
        ("--rollout-top-k", sampling.top_k),
        ("--tensor-model-parallel-size", shape.train_tp),
        ("--context-parallel-size", shape.train_cp),
        ("--rollout-num-gpus-per-engine", shape.rollout_tp * shape.rollout_cp),
        ("--max-tokens-per-gpu", plan.max_tokens_per_gpu),
        ("--vllm-gpu-memory-utilization", plan.engine.gpu_memory_utilization),
        ("--advantage-estimator", "grpo"),
        ("--kl-loss-coef", loss.kl_coef),
        ("--eps-clip", loss.clip_low),
        ("--eps-clip-high", loss.clip_high),
        ("--lr", optimizer.lr),
        ("--lr-decay-style", "constant"),
        ("--weight-decay", optimizer.weight_decay),
        ("--adam-beta1", optimizer.beta1),
        ("--adam-beta2", optimizer.beta2),
        ("--clip-grad", optimizer.clip_grad),
    ]
    switches = ["--colocate", "--use-dynamic-batch-size", "--apply-chat-template"]
    if loss.kl_coef > 0:
        switches.append("--use-kl-loss")
    if not loss.std_normalization:
        switches.append("--disable-grpo-std-normalization")
    given = [part for entry in plan.engine.runner_args for part in entry]
    return (*(text for flag, value in pairs for text in (flag, str(value))), *switches, *given)


def rollout_engine_arguments(plan: Plan) -> tuple[tuple[str, str], ...]:
    """What one rollout engine is started with, by name."""
    sizes = plan.engine.graph_capture_sizes
    graphs = f"1..{sizes[-1]}" if sizes else "none"
    deterministic = plan.mode == "consistency" or plan.engine.native_deterministic
    return (
        ("tensor_parallel_size", str(plan.topology.rollout_tp)),
        ("context_parallel_size", str(plan.topology.rollout_cp)),
        ("dtype", "bfloat16"),
        ("memory_share", f"{plan.engine.gpu_memory_utilization:g}" if plan.backend != "cpu" else "as needed"),
        ("graph_capture_sizes", graphs),
        ("batch_invariant", "yes" if deterministic else "no"),
        ("threads", str(plan.threads)),
    )
