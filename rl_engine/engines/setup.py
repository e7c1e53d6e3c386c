"""Engines from a Plan: threads, weights and settings. Every process of a run starts here."""

from __future__ import annotations

from pathlib import Path

import torch

from rl_engine.config.plan import DEVICE_KINDS, Plan, SamplingPlan
from rl_engine.engines import threads
from rl_engine.engines.rollout.builtin.draws import Decode
from rl_engine.engines.rollout.builtin.engine import RolloutEngine, RolloutSettings
from rl_engine.engines.rollout.builtin.passes import PassLog
from rl_engine.engines.train.builtin import TrainEngine, TrainSettings
from rl_engine.engines.types import SamplingSettings
from rl_engine.models.checkpoint import load_weights
from rl_engine.models.config import ModelConfig, UnsupportedModel, read_config
from rl_engine.models.sharding import LayoutRefused, Sharding
from rl_engine.models.weights import ModelWeights, WeightMismatch
from rl_engine.numerics.contract import Contract
from rl_engine.ops import Operators
from rl_engine.ops.device import driver
from rl_engine.ops.weight import CPU
from rl_engine.parallel import Mesh, join_mesh, nccl_available, single_mesh
from rl_engine.records.errors import UserError
from rl_engine.records.types import Side, ThreadSettings

GPU_PAGE = 64  # tokens: what the decode kernel of a Hopper fetches at once


def own_contract(plan: Plan) -> Contract:
    """The contract that this process' code computes with, for the plan's fold units and compiler."""
    gemm = "chain256" if plan.contract_id.endswith("-chain256") else "chain"
    return Contract(device_kind=DEVICE_KINDS[plan.backend], gemm=gemm, fold_tokens=plan.fold_tokens)


def device_of(plan: Plan, place: int = 0) -> torch.device:
    """Where rank ``place`` of a side computes, counted over all its engines: the CPU, or one of the GPUs that this
    process sees, in turns. The sides share them. A GPU becomes the one in force: kernels are launched there.

    Raises:
        UserError: torch sees no GPU, one of a kind that the contract was not proven on, or GPUs of several kinds.
    """
    if plan.backend == "cpu":
        return CPU
    if not torch.cuda.is_available():
        raise UserError(
            f"no GPU that torch {torch.__version__} sees",
            "a CUDA build of torch and a driver",
            "install them (rlk-repro doctor looks), or --backend cpu",
        )
    number = place % torch.cuda.device_count()
    name, (major, minor) = torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number)
    if torch.version.cuda is None or f"cuda-sm{major}{minor}" != DEVICE_KINDS[plan.backend]:
        raise UserError(
            f"{name} (compute capability {major}.{minor})", "9.0: the operators are proven on Hopper", "--backend cpu"
        )
    if name != torch.cuda.get_device_name(0):
        kinds = f"{torch.cuda.get_device_name(0)} and {name}"
        raise UserError(kinds, "GPUs of one kind: the first one's proof holds for all", "set CUDA_VISIBLE_DEVICES")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def device_words(device: torch.device) -> tuple[str, str | None]:
    """(device, driver) as evidence names them; no driver on a CPU, or where it does not say its version."""
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}", None
    try:
        version = driver()
    except OSError:
        version = None
    return torch.cuda.get_device_name(device), version


def use_threads(plan: Plan) -> ThreadSettings:
    """Sets the plan's thread count for torch and the C kernels, and says what is in force."""
    sides = (plan.providers.train, plan.providers.rollout)
    return threads.use_threads(plan.threads, {name for side in sides for _, name in side})


def model_config(plan: Plan) -> ModelConfig:
    """The checkpoint's shape.

    Raises:
        UserError: no decoder here computes it, or the context is too short for the response cap.
    """
    try:
        config = read_config(Path(plan.model_root))
    except UnsupportedModel as error:
        raise UserError(error.found, error.expected, error.hint) from error
    except OSError as error:
        raise UserError(str(error), "a Llama or Qwen3 checkpoint", "check --model-root") from error
    if plan.sampling.max_response_len >= config.max_positions:
        raise UserError(
            f"--max-response-len {plan.sampling.max_response_len}",
            f"less than the model's {config.max_positions} positions",
            "lower it",
        )
    return config


def join(plan: Plan, side: Side, rank: int, store: str, device: torch.device) -> Mesh:
    """This process' place among the ranks of one engine, met at ``store``; ranks of which some have a GPU together
    exchange through host memory."""
    shape = plan.topology
    tp, cp = (shape.train_tp, shape.train_cp) if side == "train" else (shape.rollout_tp, shape.rollout_cp)
    shared = device.type == "cuda" and (tp * cp > torch.cuda.device_count() or not nccl_available())
    return join_mesh(tp, cp, rank, store, device=device, shared=shared)


def read_weights(plan: Plan, mesh: Mesh | None = None, device: torch.device | None = None) -> ModelWeights:
    """The starting weights, or this rank's rows of them, on ``device`` (default: the plan's first).

    Raises:
        UserError: the checkpoint is damaged or incomplete, or cannot be cut for so many ranks; no device for it.
    """
    tp = mesh.tp if mesh is not None else single_mesh().tp
    try:
        config = model_config(plan)
        return load_weights(
            Path(plan.model_root), config, Sharding(config, tp.size, tp.index), device or device_of(plan)
        )
    except WeightMismatch as error:
        raise UserError(error.found, error.expected, error.hint) from error
    except LayoutRefused as error:
        raise UserError(
            str(error), "a TP size that divides the heads", "choose another --tp or --rollout-tp"
        ) from error


def sampling_settings(sampling: SamplingPlan, stop_tokens: tuple[int, ...]) -> SamplingSettings:
    """What decides a job's tokens beside its identity; stop strings are the job's own."""
    s = sampling
    return SamplingSettings(s.temperature, s.top_p, s.top_k, s.max_response_len, s.rollout_seed, stop_tokens)


def train_engine(plan: Plan, mesh: Mesh | None = None, device: torch.device | None = None) -> TrainEngine:
    """One trainer rank with its weights; a frozen copy beside it when the plan asks for a KL term."""
    weights = read_weights(plan, mesh, device)
    settings = TrainSettings(
        optimizer=plan.optimizer,
        loss=plan.loss,
        temperature=plan.sampling.temperature,
        fold_tokens=plan.fold_tokens,
        max_tokens=plan.max_tokens_per_gpu,
        gradients=plan.gradients,
    )
    reference = read_weights(plan, mesh, device) if plan.loss.kl_coef > 0 else None
    operators = Operators(dict(plan.providers.train))
    return TrainEngine(weights, operators, weights.config.max_positions, settings, reference, mesh=mesh)


def rollout_engine(
    plan: Plan,
    weights: ModelWeights,
    name: str,
    mesh: Mesh | None = None,
    decode: Decode | None = None,
    passes: PassLog | None = None,
) -> RolloutEngine:
    """One rollout rank; ``decode`` gives the text of token ids, for stop strings, ``passes`` collects evidence."""
    operators = Operators(dict(plan.providers.rollout))
    sizes = plan.engine.graph_capture_sizes
    page = GPU_PAGE if weights.device.type == "cuda" else RolloutSettings.page
    settings = RolloutSettings(max_batch=max(RolloutSettings.max_batch, *sizes, 0), page=page, graph_sizes=sizes)
    return RolloutEngine(weights, operators, weights.config.max_positions, settings, name, decode, mesh, passes)
