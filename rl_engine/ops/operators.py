"""The operators of one side of a run: providers chosen by name, every call counted where it executes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rl_engine.numerics.providers import CAPABILITIES, FUSED, REGISTRY, capabilities, control, defaults
from rl_engine.ops.adamw import AdamScalars
from rl_engine.ops.attention.paged import PagedBatch
from rl_engine.ops.attention.static import DecodeBatch
from rl_engine.ops.exchange import ALONE, Exchange
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.rope import FusedRope, RopeTable
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.selected_logp import LogpState, inverse_temperature
from rl_engine.ops.weight import CPU, Weight

OPERATORS = tuple(sorted(REGISTRY))


class UnknownProvider(ValueError):
    """An operator or provider that does not exist; the message names those that do."""


class WrongDevice(ValueError):
    """A provider that cannot compute where the weights lie."""


class WrongShape(ValueError):
    """A provider that has no kernel for the model's shape."""


DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}  # torch's device types in words


def provider(operator: str, name: str) -> Any:
    """The provider object of ``operator``; unknown names raise, nothing falls back."""
    if operator not in REGISTRY:
        raise UnknownProvider(f"unknown operator {operator!r}; known: {', '.join(OPERATORS)}")
    if name not in REGISTRY[operator]:
        known = ", ".join(sorted(REGISTRY[operator]))
        raise UnknownProvider(f"unknown provider {name!r} of {operator}; known: {known}")
    module, cls = REGISTRY[operator][name]
    return getattr(importlib.import_module(f"rl_engine.ops.{module}"), cls)()


def uniform(name: str, update: str | None = None) -> dict[str, str]:
    """One provider for every operator; ``stock`` has no sampler and optimizer of its own and takes ``update`` there.

    ``gpu`` is the set of an NVIDIA GPU: products by the proven table (``cublaslt``), everything else in Triton.
    """
    if name == "gpu":
        return defaults("cuda")
    if name in CAPABILITIES and not capabilities(name).contract:
        return control(dict.fromkeys(OPERATORS, update or "cpu"))
    return dict.fromkeys(OPERATORS, name)


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclasses.dataclass(frozen=True)
class Route:
    """Measured calls of one operator: rows are counted in buckets of the next power of two. ``execution`` is ``eager``
    or ``graph``: part of a captured pass that was replayed."""

    operator: str
    provider: str
    dtype: str
    rows: int
    calls: int
    execution: Literal["eager", "graph"] = "eager"


Calls = collections.Counter[tuple[str, str, int]]  # (operator, dtype, bucket of rows) -> calls


@dataclasses.dataclass
class Counted:
    """Calls of one operator while somebody counted, and the rows of all of them."""

    calls: int = 0
    rows: int = 0


class Operators:
    """What models and engines call. One method per operator; see the operator's package for its contract."""

    def __init__(self, providers: Mapping[str, str]) -> None:
        missing = set(OPERATORS) - set(providers)
        if missing:
            raise UnknownProvider(f"no provider named for {', '.join(sorted(missing))}")
        self.names = dict(providers)
        self._providers = {name: provider(name, providers[name]) for name in OPERATORS}
        self._calls: Calls = collections.Counter()
        self._replayed: Calls = collections.Counter()
        self._counted: dict[str, Counted] = {}

    def check_device(self, device: torch.device) -> None:
        """
        Raises:
            WrongDevice: a provider computes on another kind of device.
        """
        for operator, name in sorted(self.names.items()):
            devices = capabilities(name).devices
            if devices and device.type not in devices:
                where = " or ".join(DEVICES.get(kind, kind) for kind in devices)
                raise WrongDevice(f"provider {name} of {operator} computes on {where}, the weights lie on {device}")

    def check_head(self, width: int) -> None:
        """
        Raises:
            WrongShape: the attention provider has no kernel for heads of ``width``.
        """
        name = self.names["attention"]
        known = capabilities(name).head_dims
        if known and width not in known:
            words = ", ".join(str(each) for each in known)
            raise WrongShape(f"the {name} attention provider knows head_dim {words}, not {width}")

    @property
    def captures(self) -> bool:
        """Whether a decode pass of all these providers can be captured as a device graph."""
        return all(capabilities(name).captures for name in self.names.values())

    def count(self, operator: str, x: Tensor) -> None:
        """Counts one call of ``operator`` on the rows of ``x``."""
        rows = x.shape[0] if x.dim() else 1
        self._calls[operator, _dtype_name(x.dtype), 1 << max(rows - 1, 0).bit_length()] += 1
        if operator in self._counted:
            self._counted[operator].calls += 1
            self._counted[operator].rows += rows

    def provider(self, operator: str) -> Any:
        """The provider's kernels, for code that counts its own calls."""
        return self._providers[operator]

    def _use(self, operator: str, x: Tensor) -> Any:
        self.count(operator, x)
        return self._providers[operator]

    @contextlib.contextmanager
    def counting(self, operator: str) -> Iterator[Counted]:
        """Counts the launched calls of ``operator`` inside, apart from all others."""
        assert operator not in self._counted, "one count of an operator at a time"
        counted = self._counted[operator] = Counted()
        try:
            yield counted
        finally:
            del self._counted[operator]

    @contextlib.contextmanager
    def recording(self) -> Iterator[Calls]:
        """Calls inside are recorded for replays and did not execute: they count in what is handed out alone."""
        executed, self._calls = self._calls, collections.Counter()
        try:
            yield self._calls
        finally:
            self._calls = executed

    def count_replay(self, calls: Calls) -> None:
        """Counts one replay of recorded ``calls``."""
        self._replayed.update(calls)

    def routes(self) -> list[Route]:
        """Every operator that ran, in order: launched calls, then those of replayed graphs."""
        forms: tuple[tuple[Literal["eager", "graph"], Calls], ...] = (("eager", self._calls), ("graph", self._replayed))
        return [
            Route(operator, self.names[FUSED.get(operator, (operator,))[0]], dtype, rows, calls, execution)
            for execution, counted in forms
            for (operator, dtype, rows), calls in sorted(counted.items())
        ]

    def pack(self, weights: list[Weight], *, drop_value: bool) -> None:
        """Prepares 2-D weights for decoding where linear and head read weights packed in one layout."""
        layouts = {capabilities(self.names[operator]).packing for operator in ("linear", "lm_head")}
        if len(layouts) == 1 and "" not in layouts:
            for weight in weights:
                self._providers["linear"].pack(weight, drop_value=drop_value)

    def embedding(
        self, ids: Tensor, weight: Weight, layout: PackedLayout | None = None, exchange: Exchange = ALONE
    ) -> Tensor:
        return self._use("embedding", ids)(ids, weight, layout, exchange)

    def finish_embedding(self, weight: Weight) -> None:
        self._providers["embedding"].finish(weight)

    def linear(
        self,
        x: Tensor,
        weight: Weight,
        residual: Tensor | None = None,
        layout: PackedLayout | None = None,
        exchange: Exchange = ALONE,
        bias: Weight | None = None,
    ) -> Tensor:
        return self._use("linear", x)(x, weight, residual, layout, exchange, bias)

    def rms_norm(
        self, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None = None, exchange: Exchange = ALONE
    ) -> Tensor:
        return self._use("rms_norm", x)(x, weight, eps, layout, exchange)

    def qk_norm(
        self, x: Tensor, weight: Weight, eps: float, layout: PackedLayout | None = None, exchange: Exchange = ALONE
    ) -> Tensor:
        return self._use("qk_norm", x)(x, weight, eps, layout, exchange)

    def rope(self, x: Tensor, positions: Tensor, table: RopeTable) -> Tensor:
        return self._use("rope", x)(x, positions, table)

    def fuses_qk_norm(self, width: int) -> bool:
        """Whether :meth:`qk_norm_rope` is one call at head_dim ``width``."""
        rope, norm = self._providers["rope"], self._providers["qk_norm"]
        return isinstance(rope, FusedRope) and rope.fuses(norm, width)

    def qk_norm_rope(
        self,
        q: Tensor,
        k: Tensor,
        q_norm: Weight,
        k_norm: Weight,
        eps: float,
        positions: Tensor,
        table: RopeTable,
        layout: PackedLayout | None = None,
        exchange: Exchange = ALONE,
    ) -> tuple[Tensor, Tensor]:
        """q and k normed, then rotated: by the fused operator where the providers have one, to the same bits."""
        if self.fuses_qk_norm(q.shape[2]):
            self.count("qk_norm_rope", q)
            fused: FusedRope = self._providers["rope"]
            norm = self._providers["qk_norm"]
            return fused.with_norm(q, k, q_norm, k_norm, eps, positions, table, layout, norm, exchange)
        q, k = self.qk_norm(q, q_norm, eps, layout, exchange), self.qk_norm(k, k_norm, eps, layout, exchange)
        return self.rope(q, positions, table), self.rope(k, positions, table)

    def attention_packed(
        self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, exchange: Exchange = ALONE
    ) -> Tensor:
        return self._use("attention", q).packed(q, k, v, layout, exchange)

    def attention_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, layer: int, batch: Any) -> Tensor:
        return self._use("attention", q).cached(q, k, v, cache, layer, batch)

    def attention_decode(self, q: Tensor, k: Tensor, v: Tensor, cache: Any, layer: int, batch: DecodeBatch) -> Tensor:
        """As ``attention_cached``; a graph that captured it may be replayed with other positions, slots and tables."""
        return self._use("attention", q).cached(q, k, v, cache, layer, batch)

    def attention_over_pages(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: PagedBatch,
        *,
        settled: bool = False,
    ) -> Tensor:
        """As ``attention_cached`` over pages that somebody else owns; see ``AttentionProvider.over_pages``."""
        return self._use("attention", q).over_pages(q, k, v, k_pages, v_pages, batch, settled=settled)

    def paired_pages(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """(k_pages, v_pages): views of one tensor of keys and values, see ``AttentionProvider.paired_pages``."""
        found: tuple[Tensor, Tensor] = self._providers["attention"].paired_pages(pages)
        return found

    def new_cache(
        self, layers: int, kv_heads: int, width: int, pages: int, page: int, device: torch.device = CPU
    ) -> Any:
        """A KV cache of the attention provider's own kind on ``device``."""
        return self._providers["attention"].new_cache(layers, kv_heads, width, pages, page, device)

    def swiglu(self, x: Tensor) -> Tensor:
        return self._use("swiglu", x)(x)

    def logits(self, hidden: Tensor, weight: Weight) -> Tensor:
        return self._use("lm_head", hidden).logits(hidden, weight)

    def logp_from_logits(
        self, z: Tensor, targets: Tensor, temperature: float, mask: Tensor | None, exchange: Exchange = ALONE
    ) -> tuple[Tensor, Tensor]:
        return self._use("selected_logp", z).from_logits(z, targets, temperature, mask, exchange)

    def score(
        self,
        hidden: Tensor,
        weight: Weight,
        targets: Tensor,
        temperature: float,
        mask: Tensor | None,
        layout: PackedLayout,
        rows: Tensor,
        exchange: Exchange = ALONE,
    ) -> tuple[Tensor, Tensor]:
        head, scorer = self._use("lm_head", rows), self._use("selected_logp", rows)
        return scorer.score(hidden, weight, targets, temperature, mask, layout, rows, head, exchange)

    def draw(
        self, z: Tensor, inv_t: float, mask: Tensor | None, keys: list[DrawKey], exchange: Exchange = ALONE
    ) -> Tensor:
        return self._use("sample", z).draw(z, inv_t, mask, keys, exchange)

    def draw_and_score(self, z: Tensor, temperature: float, words: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens int64 [R], logprobs fp32 [R]) of draws from all columns of logits z fp32 [R, V], identities int32
        [R, 5] on the device: seed, step, position, sample, prompt. Nothing is compared on the host: a row with a NaN
        has token -1."""
        inv_t, state = inverse_temperature(temperature), LogpState.empty(z.shape[0], z.device)
        tokens: Tensor = self._use("sample", z).best_of(z, 0, inv_t, None, words)[1]
        scorer = self._use("selected_logp", z)
        scorer.merge_columns(z, 0, z.shape[1], inv_t, None, tokens, state)
        return tokens, scorer.finish(state)[0]

    def norm_bins(self, *grads: Tensor) -> Tensor:
        return self._use("grad_norm", grads[0]).bins(*grads)

    def adamw(
        self,
        master: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        weight: Tensor | None,
        clip: float,
        scalars: AdamScalars,
    ) -> Tensor:
        with torch.no_grad():
            return self._use("adamw", grad).update(master, m, v, grad, weight, clip, scalars)
