"""The built-in trainer, one rank: scoring and GRPO updates with fp32 master weights, exact gradient norm and AdamW."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_engine.config.plan import LossPlan, OptimizerPlan
from rl_engine.engines.snapshot import export_snapshot
from rl_engine.engines.train.batching import MicroBatch, build_micro_batch, fold_units, micro_batches
from rl_engine.engines.train.grpo import TokenLoss, token_loss
from rl_engine.engines.types import Sample, UpdateResult, WeightSnapshot
from rl_engine.models.decoder import Decoder
from rl_engine.models.weights import ModelWeights
from rl_engine.ops import Operators
from rl_engine.ops.adamw import AdamScalars
from rl_engine.ops.grad_norm import clip_factor, norm_from_bins
from rl_engine.ops.weight import Weight
from rl_engine.parallel import Mesh, bounds, single_mesh

Logprobs = list[npt.NDArray[np.float32]]
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """``max_tokens`` per micro-batch (None: one fold unit each) changes memory and speed, never a bit.

    ``gradients`` is ``invariant`` (bits independent of TP, CP and packing) or ``deterministic`` (same layout and
    packing, same bits; a micro-batch is one fold unit, and CP ranks exchange sums once a step instead of tokens).
    """

    optimizer: OptimizerPlan
    loss: LossPlan
    temperature: float
    fold_tokens: int
    max_tokens: int | None
    recompute: bool = True
    gradients: str = "invariant"


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerState:
    """fp32 of the weight's shape."""

    master: Tensor
    m: Tensor
    v: Tensor


class TrainEngine:
    """One rank; all ranks of ``mesh`` call the same methods with the same arguments and get the same results.

    Args:
        weights: this rank's rows of the model; trained in place.
        operators: providers of the train side.
        positions: longest prompt plus response.
        reference: frozen model of the KL term; needed where ``settings.loss.kl_coef`` > 0.
        mesh: the ranks that train together; one by default.
    """

    def __init__(
        self,
        weights: ModelWeights,
        operators: Operators,
        positions: int,
        settings: TrainSettings,
        reference: ModelWeights | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        assert settings.loss.kl_coef == 0 or reference is not None
        self.weights, self.ops, self.settings = weights, operators, settings
        self.mesh = mesh or single_mesh()
        local = settings.gradients == "deterministic"
        self.decoder = Decoder(weights, operators, positions, self.mesh, local_sums=local)
        self.reference = Decoder(reference, operators, positions, self.mesh) if reference is not None else None
        self.version = 0
        self.state: dict[str, OptimizerState] = {}
        weights.refresh_input_shards(self.mesh.tp)
        for weight in weights:
            # Each CP rank keeps the optimizer state of other rows of every weight.
            rows = self.own_rows(weight)
            # Stock operators differentiate through autograd; ours write weight.grad themselves.
            weight.value.requires_grad_(True)
            master = weight.value.detach()[rows[0] : rows[1]].float()
            self.state[weight.name] = OptimizerState(master, torch.zeros_like(master), torch.zeros_like(master))

    def score(self, samples: list[Sample], progress: Progress | None = None) -> Logprobs:
        """The trainer's logprob of every response token, fp32 [R] per sample."""
        return self._score(self.decoder, samples, progress)

    def scoring_passes(self, samples: list[Sample]) -> Iterator[tuple[MicroBatch, Tensor, Tensor]]:
        """On one rank, what :meth:`score` computes, pass by pass: (micro-batch, bf16 [T, H] behind the last norm,
        logprobs fp32 [R])."""
        assert self.mesh.size == 1
        with torch.no_grad():
            for batch in self._batches(samples):
                hidden = self.decoder.hidden_packed(batch.ids, batch.layout, False)
                yield batch, hidden, self._logprobs_of(self.decoder, batch, hidden)[0]

    def score_reference(self, samples: list[Sample]) -> Logprobs:
        """The frozen reference model's logprobs, with the same temperature and retained sets."""
        assert self.reference is not None
        return self._score(self.reference, samples, None)

    def _score(self, decoder: Decoder, samples: list[Sample], progress: Progress | None) -> Logprobs:
        results: dict[int, npt.NDArray[np.float32]] = {}
        batches = self._batches(samples)
        with torch.no_grad():
            for number, batch in enumerate(batches):
                logp, _ = self._logprobs(decoder, batch, recompute=False)
                logp = decoder.exchange.join_rows(batch.layout, batch.rows, logp)
                for index, values in zip(batch.indices, logp.split(batch.counts), strict=True):
                    results[index] = values.cpu().numpy().copy()
                if progress is not None:
                    progress(number + 1, len(batches))
        return [results[index] for index in range(len(samples))]

    def step(
        self,
        samples: list[Sample],
        advantages: list[float],
        old_logprobs: Logprobs,
        reference_logprobs: Logprobs | None = None,
        progress: Progress | None = None,
    ) -> UpdateResult:
        """One update over all samples, given in canonical order.

        Raises:
            NonFiniteGradient: nothing was changed.
            ValueError: a fold unit exceeds ``max_tokens``.
        """
        started = time.perf_counter()
        loss_tokens = sum(len(s.response_tokens) for s in samples)
        for weight in self.weights:
            self._open_gradient(weight)
        totals = _Totals()
        batches = self._batches(samples)
        for number, batch in enumerate(batches):
            self._backward(batch, advantages, old_logprobs, reference_logprobs, loss_tokens, totals)
            if progress is not None:
                progress(number + 1, len(batches))
        self.ops.finish_embedding(self.weights.embedding)
        for weight in self.weights:
            self.decoder.exchange.fold_gradients(weight, self.own_rows(weight))
        if self.weights.device.type == "cuda":
            torch.cuda.synchronize(self.weights.device)  # its kernels run behind this process
        trained = time.perf_counter()
        norm, changed = self._update()
        return UpdateResult(
            loss=math.fsum(totals.loss),
            kl_mean=math.fsum(totals.kl) / loss_tokens,
            entropy_mean=math.fsum(totals.entropy) / loss_tokens,
            clip_fraction=totals.clipped / loss_tokens,
            grad_norm=norm,
            ratio_mismatches=totals.ratio_mismatches,
            loss_tokens=loss_tokens,
            train_tokens=sum(s.length for s in samples),
            micro_batches=len(batches),
            seconds_train=trained - started,
            seconds_optimizer=time.perf_counter() - trained,
            changed_elements=changed,
            elements=sum(math.prod(shape) for shape in self.weights.config.tensor_shapes().values()),
        )

    def release_gradients(self) -> None:
        """Gives the gradients' memory back until the next update: four bytes a parameter."""
        for weight in self.weights:
            weight.drop_gradient()

    def export(self) -> WeightSnapshot:
        """The bf16 weights of the current version."""
        return export_snapshot(self.weights, self.version)

    def gradient_rows(self) -> dict[str, tuple[int, Tensor]]:
        """HF name -> (first row, fp32 gradient rows of this rank) of the last update, before clipping."""
        gradients: dict[str, tuple[int, Tensor]] = {}
        for weight in self.weights:
            gradients.update(weight.part_gradients())
        return gradients

    def gradients(self) -> dict[str, Tensor]:
        """HF name -> fp32 gradient rows of this rank (all of them on one rank), before clipping."""
        return {name: rows for name, (_, rows) in self.gradient_rows().items()}

    def own_rows(self, weight: Weight) -> tuple[int, int]:
        """(first, last + 1) of the rows whose gradient and optimizer state this CP rank keeps."""
        return bounds(weight.shape[0], self.mesh.cp.size)[self.mesh.cp.index]

    def weights_from_master(self) -> None:
        """bf16 weights of every rank from the fp32 masters, which somebody replaced; all ranks call it."""
        with torch.no_grad():
            for weight in self.weights:
                first, last = self.own_rows(weight)
                weight.value[first:last] = self.state[weight.name].master.to(torch.bfloat16)
                self._share_rows(weight)
            self.weights.refresh_input_shards(self.mesh.tp)

    def _open_gradient(self, weight: Weight) -> None:
        """A zero gradient of own rows, or of all rows where each rank sums its own tokens."""
        local = self.settings.gradients == "deterministic"
        rows = (0, weight.shape[0]) if local else self.own_rows(weight)
        if not weight.trains or weight.grad_rows != rows:
            weight.enable_training(rows)
        weight.clear_gradient()
        weight.lookups.clear()

    def _batches(self, samples: list[Sample]) -> list[MicroBatch]:
        lengths = [s.length for s in samples]
        units = fold_units(lengths, self.settings.fold_tokens)
        vocabulary = self.weights.config.vocabulary
        cut = micro_batches(units, lengths, self.settings.max_tokens)
        if self.settings.gradients == "deterministic":
            cut = [[[index for unit in chosen for index in unit]] for chosen in cut]
        return [build_micro_batch(samples, chosen, vocabulary) for chosen in cut]

    def _logprobs(self, decoder: Decoder, batch: MicroBatch, recompute: bool) -> tuple[Tensor, Tensor]:
        return self._logprobs_of(decoder, batch, decoder.hidden_packed(batch.ids, batch.layout, recompute))

    def _logprobs_of(self, decoder: Decoder, batch: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return decoder.score(hidden, batch.targets, self.settings.temperature, batch.mask, batch.layout, batch.rows)

    def _backward(
        self,
        batch: MicroBatch,
        advantages: list[float],
        old: Logprobs,
        reference: Logprobs | None,
        loss_tokens: int,
        totals: _Totals,
    ) -> None:
        exchange = self.decoder.exchange
        logp, entropy = self._logprobs(self.decoder, batch, self.settings.recompute)
        # Every CP rank sees all tokens' logprobs, so losses and metrics are the same sums on each.
        values = exchange.join_rows(batch.layout, batch.rows, logp.detach()).cpu().numpy()
        entropies = exchange.join_rows(batch.layout, batch.rows, entropy.detach()).cpu().numpy()
        old_values = np.concatenate([old[index] for index in batch.indices])
        tokens = token_loss(
            values.astype(np.float64),
            old_values.astype(np.float64),
            None if reference is None else np.concatenate([reference[i] for i in batch.indices]).astype(np.float64),
            np.repeat(np.array([advantages[index] for index in batch.indices]), batch.counts),
            loss_tokens,
            (self.settings.loss.clip_low, self.settings.loss.clip_high),
            self.settings.loss.kl_coef,
        )
        coefficient = torch.from_numpy(tokens.coefficient.astype(np.float32))
        logp.backward(coefficient[exchange.own_rows(batch.layout, batch.rows)[0]].to(logp.device))
        for weight in self.weights:
            if weight.value.grad is not None:  # a stock operator's gradient, bf16, one micro-batch
                assert weight.grad is not None
                weight.grad.add_(exchange.autograd_rows(weight.value.grad, weight))
                weight.value.grad = None
        totals.add(tokens, entropies, values, old_values)

    def _update(self) -> tuple[float, int]:
        """(gradient norm before clipping, bf16 weights that changed)."""
        bins = self.ops.norm_bins(*(w.grad for w in self.weights if w.grad is not None and self._counts_here(w)))
        norm = norm_from_bins(torch.stack(self.mesh.world.all_gather(bins, purpose="gradient norm")).sum(0))
        clip = clip_factor(norm, self.settings.optimizer.clip_grad)
        with torch.no_grad():
            changes = [self._update_weight(weight, clip) for weight in self.weights]
            self.weights.refresh_input_shards(self.mesh.tp)
        changed = torch.stack(changes).sum(0, keepdim=True)
        counts = self.mesh.world.all_gather(changed, purpose="gradient norm")
        self.version += 1
        return norm, int(torch.stack(counts).sum())

    def _update_weight(self, weight: Weight, clip: float) -> Tensor:
        """Updates this rank's rows, then shares them with the CP group; how many of them changed in bf16, int64 []."""
        adam, state = self.settings.optimizer, self.state[weight.name]
        decay = adam.weight_decay if len(weight.shape) == 2 else 0.0
        scalars = AdamScalars.at(self.version + 1, adam.lr, adam.beta1, adam.beta2, adam.eps, decay)
        first, last = weight.grad_rows
        assert weight.grad is not None
        own = weight.value[first:last]
        changed = self.ops.adamw(state.master, state.m, state.v, weight.grad, own, clip, scalars)
        self._share_rows(weight)
        return changed if self._counts_here(weight) else torch.zeros_like(changed)

    def _counts_here(self, weight: Weight) -> bool:
        """Whether norm and changes of ``weight`` count on this rank: one that every TP rank holds counts once."""
        return self.mesh.tp.index == 0 or not self.weights.sharding.is_replicated(weight.name)

    def _share_rows(self, weight: Weight) -> None:
        """Every CP rank's own bf16 rows to the whole CP group."""
        cp = self.mesh.cp
        if cp.size == 1:
            return
        slices = bounds(weight.shape[0], cp.size)
        first, last = slices[cp.index]
        shapes = [(b - a, *weight.shape[1:]) for a, b in slices]
        parts = cp.all_gather(weight.value[first:last], shapes, purpose="weights")
        for (a, b), part in zip(slices, parts, strict=True):
            weight.value[a:b] = part


@dataclasses.dataclass
class _Totals:
    """Per-token values of the whole update; sums are taken once, correctly rounded."""

    loss: list[float] = dataclasses.field(default_factory=list)
    kl: list[float] = dataclasses.field(default_factory=list)
    entropy: list[float] = dataclasses.field(default_factory=list)
    clipped: int = 0
    ratio_mismatches: int = 0

    def add(
        self,
        tokens: TokenLoss,
        entropy: npt.NDArray[np.float32],
        logp: npt.NDArray[np.float32],
        old: npt.NDArray[np.float32],
    ) -> None:
        self.loss.extend(tokens.loss.tolist())
        self.kl.extend(tokens.kl.tolist())
        self.entropy.extend(entropy.astype(np.float64).tolist())
        self.clipped += int(tokens.clipped.sum())
        self.ratio_mismatches += int((logp.view(np.int32) != old.view(np.int32)).sum())
