"""Which providers there are, which operators each has, and what it can do: the one table that every room asks.

A new provider is its kernels (``rl_engine/ops/<operator>/<provider>.py``), its rows in :data:`REGISTRY`, its
:class:`Capabilities` and, where runs shall take it by themselves, its place in :data:`DEFAULTS`. Nothing else compares
its name. No torch here: plans are made, and run directories judged, without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

# operator -> provider name -> (module, class)
REGISTRY: dict[str, dict[str, tuple[str, str]]] = {
    "embedding": {
        "reference": ("embedding.reference", "ReferenceEmbedding"),
        "cpu": ("embedding.cpu", "CpuEmbedding"),
        "torch": ("embedding.reference", "ReferenceEmbedding"),
        "stock": ("embedding.stock", "StockEmbedding"),
        "triton": ("embedding.triton", "TritonEmbedding"),
    },
    "linear": {
        "reference": ("linear.reference", "ReferenceLinear"),
        "cpu": ("linear.cpu", "CpuLinear"),
        "torch": ("linear.reference", "FallbackLinear"),
        "stock": ("linear.stock", "StockLinear"),
        "triton": ("linear.triton", "TritonLinear"),
        "cublaslt": ("linear.cublaslt", "LtLinear"),
    },
    "rms_norm": {
        "reference": ("rms_norm.reference", "ReferenceNorm"),
        "cpu": ("rms_norm.cpu", "CpuNorm"),
        "torch": ("rms_norm.reference", "ReferenceNorm"),
        "stock": ("rms_norm.stock", "StockNorm"),
        "triton": ("rms_norm.triton", "TritonNorm"),
    },
    "rope": {
        "reference": ("rope.reference", "ReferenceRope"),
        "cpu": ("rope.cpu", "CpuRope"),
        "torch": ("rope.reference", "ReferenceRope"),
        "stock": ("rope.stock", "StockRope"),
        "triton": ("rope.triton", "TritonRope"),
    },
    "attention": {
        "reference": ("attention.reference", "ReferenceAttention"),
        "cpu": ("attention.cpu", "CpuAttention"),
        "torch": ("attention.reference", "FallbackAttention"),
        "stock": ("attention.stock", "StockAttention"),
        "triton": ("attention.triton", "TritonAttention"),
    },
    "swiglu": {
        "reference": ("swiglu.reference", "ReferenceSwiglu"),
        "cpu": ("swiglu.cpu", "CpuSwiglu"),
        "torch": ("swiglu.reference", "ReferenceSwiglu"),
        "stock": ("swiglu.stock", "StockSwiglu"),
        "triton": ("swiglu.triton", "TritonSwiglu"),
    },
    "lm_head": {
        "reference": ("lm_head.reference", "ReferenceHead"),
        "cpu": ("lm_head.cpu", "CpuHead"),
        "torch": ("lm_head.reference", "FallbackHead"),
        "stock": ("lm_head.stock", "StockHead"),
        "triton": ("lm_head.triton", "TritonHead"),
        "cublaslt": ("lm_head.cublaslt", "LtHead"),
    },
    "selected_logp": {
        "reference": ("selected_logp.reference", "ReferenceLogp"),
        "cpu": ("selected_logp.cpu", "CpuLogp"),
        "torch": ("selected_logp.reference", "ReferenceLogp"),
        "stock": ("selected_logp.stock", "StockLogp"),
        "triton": ("selected_logp.triton", "TritonLogp"),
    },
    "sample": {
        "reference": ("sample.reference", "ReferenceSample"),
        "cpu": ("sample.cpu", "CpuSample"),
        "torch": ("sample.reference", "ReferenceSample"),
        "triton": ("sample.triton", "TritonSample"),
    },
    "adamw": {
        "reference": ("adamw.reference", "ReferenceAdam"),
        "cpu": ("adamw.cpu", "CpuAdam"),
        "torch": ("adamw.reference", "ReferenceAdam"),
        "triton": ("adamw.triton", "TritonAdam"),
    },
    "grad_norm": {
        "reference": ("grad_norm.reference", "ReferenceNormBins"),
        "cpu": ("grad_norm.cpu", "CpuNormBins"),
        "torch": ("grad_norm.reference", "ReferenceNormBins"),
        "triton": ("grad_norm.triton", "TritonNormBins"),
    },
}
GPU = ("triton", "cublaslt")  # providers that need Triton and a GPU
ANYWHERE = ("stock",)  # torch's own, on whatever device torch has; all others compute on a CPU
REGISTRY["qk_norm"] = REGISTRY["rms_norm"]
OPERATORS: tuple[str, ...] = (
    "embedding",
    "linear",
    "rms_norm",
    "qk_norm",
    "rope",
    "attention",
    "swiglu",
    "lm_head",
    "selected_logp",
    "sample",
    "adamw",
    "grad_norm",
)
# What one provider of several operators does in one call, counted under its own name -> those operators
FUSED: dict[str, tuple[str, ...]] = {"qk_norm_rope": ("qk_norm", "rope")}


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What a provider can do, the same for every operator that it has.

    Attributes:
        devices: torch's device types (``cpu``, ``cuda``; an AMD GPU is ``cuda`` to torch) that its kernels compute on;
            none: wherever torch computes.
        contract: it promises the contract's bits and is proven; otherwise torch's own arithmetic, the control.
        gemm: the contract's order of matrix products, ``chain`` or ``chain256``. The latter is the BLAS library's own
            inside blocks: it is held against itself, and proven for whole tensors only.
        packing: the layout of the packed weights that its products read, empty where they read none. Weights are packed
            where ``linear`` and ``lm_head`` have the same.
        compiled: its kernels are those of the compiled C library, on threads of their own.
        captures: a decode pass can be captured as a device graph and replayed: pages, positions and identities of draws
            are read on the device (a ``DecodeBatch``), nothing waits on the host.
        proven_apart: ``qualify`` proves it on its device before a run, and keeps the proof.
        head_dims: head sizes that its attention takes; none: any.
    """

    devices: tuple[str, ...] = ()
    contract: bool = True
    gemm: str = "chain"
    packing: str = ""
    compiled: bool = False
    captures: bool = False
    proven_apart: bool = False
    head_dims: tuple[int, ...] = ()


_GPU = Capabilities(devices=("cuda",), captures=True, proven_apart=True, head_dims=(32, 64, 128))
CAPABILITIES: dict[str, Capabilities] = {
    "reference": Capabilities(devices=("cpu",)),
    "cpu": Capabilities(devices=("cpu",), packing="panels", compiled=True),
    "torch": Capabilities(devices=("cpu",), gemm="chain256"),
    "stock": Capabilities(contract=False, packing="onednn"),
    "triton": _GPU,
    "cublaslt": _GPU,
}
# backend -> who computes there by default: for each operator the first that has it
DEFAULTS: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("cublaslt", "triton"), "rocm": ("triton",)}
WITHOUT_COMPILER = ("torch",)  # on a CPU that has no C compiler
CONTROL, JUDGE = "stock", "reference"


def capabilities(name: str) -> Capabilities:
    """What provider ``name`` can do.

    Raises:
        KeyError: there is no such provider.
    """
    return CAPABILITIES[name]


def defaults(backend: str, compiler: bool = True) -> dict[str, str]:
    """Operator -> the provider of the contract that a run takes on ``backend``; ``compiler``: there is one for C."""
    order = DEFAULTS[backend]
    if not compiler and any(capabilities(name).compiled for name in order):
        order = WITHOUT_COMPILER
    return {operator: next(name for name in order if name in REGISTRY[operator]) for operator in OPERATORS}


def control(ours: dict[str, str]) -> dict[str, str]:
    """The same with torch's own operators wherever it has one; a sampler and an optimizer it has not."""
    return {operator: CONTROL if CONTROL in REGISTRY[operator] else name for operator, name in ours.items()}


def judged() -> tuple[str, ...]:
    """Providers that are held against the reference where a run starts; the others make no promise, or are proven apart
    from runs."""
    return tuple(n for n, able in CAPABILITIES.items() if able.contract and not able.proven_apart and n != JUDGE)


def is_stock(name: str) -> bool:
    """Whether a plan's or a record's provider ``name`` is torch's own arithmetic. One that this version does not know
    is not: its bits were promised by whoever wrote the name."""
    return name in CAPABILITIES and not CAPABILITIES[name].contract


def any_stock(names: Iterable[str]) -> bool:
    """Whether one of them is torch's own arithmetic."""
    return any(is_stock(name) for name in names)
