"""The resolved run. One Plan is hashed, stored in ``plan.json`` and is the only source of values for every worker."""

from __future__ import annotations

import dataclasses

from rl_engine.config.engines import STACKS, Engines
from rl_engine.records.codec import added

DEVICE_KINDS = {"cpu": "cpu", "cuda": "cuda-sm90", "rocm": "rocm-gfx942"}  # backend -> the contract's device kind


@dataclasses.dataclass(frozen=True)
class SamplingPlan:
    """How tokens are drawn. ``top_k`` -1 and ``top_p`` 1.0 skip their filter; ``max_response_len`` in tokens; a text of
    ``stop_strings`` ends a response as the model's stop tokens do."""

    temperature: float
    top_p: float
    top_k: int
    max_response_len: int
    rollout_seed: int
    stop_strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OptimizerPlan:
    """AdamW with a constant learning rate; ``clip_grad`` is the maximal global gradient norm."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip_grad: float


@dataclasses.dataclass(frozen=True)
class LossPlan:
    """GRPO. ``advantage_eps`` is added to the group's deviation when ``std_normalization`` is on."""

    kl_coef: float
    std_normalization: bool
    advantage_eps: float
    clip_low: float
    clip_high: float


@dataclasses.dataclass(frozen=True)
class DataPlan:
    """Prompts. ``source`` is ``arithmetic`` (generated, ``path`` None) or ``jsonl`` (``path`` is the file)."""

    source: str
    path: str | None
    prompts_per_step: int
    samples_per_prompt: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Topology:
    """Ranks of each side. ``rollout_engines`` engines of ``rollout_tp * rollout_cp`` ranks each."""

    train_tp: int
    train_cp: int
    rollout_tp: int
    rollout_cp: int
    rollout_engines: int


@dataclasses.dataclass(frozen=True)
class ProviderPlan:
    """Provider of every operator on both sides, as sorted (operator, provider) pairs.

    Operators: see ``rl_engine.ops.OPERATORS``. Providers: ``stock`` (torch's own operators), ``cpu`` (the C chain),
    ``torch`` (the fallback without a C compiler); on a GPU ``cublaslt`` (products by the proven table) and ``triton``.
    """

    train: tuple[tuple[str, str], ...]
    rollout: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """Shape of the model, from its ``config.json`` where that is on disk, else from the profile.

    ``padded_vocab_size`` is the next multiple of 128 x 8 on every backend.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    tied: bool


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """Engine settings that change speed and memory, never a value.

    ``gpu_memory_utilization`` is a share of device memory; ``graph_capture_sizes`` are batch sizes (empty: no graphs).
    """

    gpu_memory_utilization: float = 0.4
    graph_capture_sizes: tuple[int, ...] = ()
    oversubscribe: bool = False
    pd: bool = False
    native_deterministic: bool = False
    runner_args: tuple[tuple[str, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class RayPlan:
    """Ray. ``address`` None means our own head on loopback; port 0 takes a free one."""

    address: str | None = None
    port: int = 0
    dashboard_port: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything a run needs to know, resolved once."""

    schema_version: str
    profile: str
    mode: str  # native | consistency
    backend: str  # cpu | cuda | rocm
    stack: str  # builtin | megatron-vllm | vime | custom: the two engines that are named below
    run_id: str
    run_dir: str
    model_root: str
    python: str
    rollouts: int
    seed: int
    global_batch_size: int
    max_tokens_per_gpu: int
    fold_tokens: int
    threads: int
    require_updates: bool
    gradients: str  # invariant | deterministic
    contract_id: str
    contract_digest: str
    evidence: str  # formal | experimental | development
    topology: Topology
    sampling: SamplingPlan
    optimizer: OptimizerPlan
    loss: LossPlan
    data: DataPlan
    providers: ProviderPlan
    model: ModelFacts | None = None
    engine: EnginePlan = EnginePlan()
    ray: RayPlan = RayPlan()
    pair_id: str | None = None  # run id that both runs of a pair share
    output_root: str = ""
    paths: tuple[tuple[str, str], ...] = ()  # resolved (name, path), sorted; unset ones absent
    allow_dirty: bool = False
    checkpoint_every: int = 1  # finished steps from one saved trainer state to the next; 0 saves none
    require_control: bool = False
    train_engine: str = added("")  # named where no stack has the pair
    rollout_engine: str = added("")

    @property
    def engines(self) -> Engines:
        """The engine of each side, by name."""
        named = STACKS.get(self.stack, Engines("", ""))
        return Engines(self.train_engine or named.train, self.rollout_engine or named.rollout)

    @property
    def local(self) -> bool:
        """Whether this package's own loop runs it; otherwise another orchestrator does."""
        return self.stack != "vime"
