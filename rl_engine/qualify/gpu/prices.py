"""What the guarantees cost beside products: attention, row operators and log-probabilities against torch's own.

Native is the fastest of what torch offers for the same numbers: scaled dot-product attention by cuDNN or flash (keys
and values not paged, which flatters it), ``rms_norm``, elementwise rotation and SwiGLU, bf16 logits with an fp32
``log_softmax`` and autograd. The products' own prices come with their choice (``products.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl_engine.models.config import ModelConfig
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider, uniform
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.rope.triton import can_fuse, qk_norm_rope, qk_norm_rope_backward
from rl_engine.ops.weight import Part, Weight
from rl_engine.qualify.gpu.data import Inputs
from rl_engine.qualify.gpu.run import write_record
from rl_engine.qualify.gpu.timing import Run, microseconds

Prices = dict[str, dict[int, tuple[float, float]]]  # operator -> rows -> (ours, native) microseconds
Row = tuple[str, int, float, float]

BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
PACKED = (4096, 16384)  # tokens of one sample
CACHED = ((8, 16384), (64, 4096))  # samples that take one token each, tokens of each before it
TOKENS = (64, 8192)  # of the row operators
SCORED = (1024, 4096)  # tokens
PAGE = 64
SECONDS = 0.05
FAMILIES = ("attention", "decode", "rows", "logp")
LEVELS = {  # first word of a price's name -> the guarantee that it belongs to
    "forward": "L1-L3 products",
    "attention": "L1-L3 attention",
    "decode": "L1-L3 decode attention",
    "rows": "L1-L3 norms, RoPE, SwiGLU",
    "logp": "L1-L3 log-probabilities",
    "dx": "L4 dX",
    "fold": "L4 dW",
    "attention-backward": "L4 attention",
    "rows-backward": "L4 norms, RoPE, SwiGLU",
    "logp-first": "L4 log-probabilities, forward too, a step's first micro-batch",
    "logp-later": "L4 log-probabilities, forward too, later micro-batches",
}


def levels(prices: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Price of each guarantee, time against native's: the model's products in sum, every other operator alone.

    L1, L2 and L3 are the same forward kernels; L4 adds the backward ones.
    """
    sums: dict[str, dict[str, list[float]]] = {level: {} for level in LEVELS.values()}
    for name, points in prices.items():
        level = LEVELS.get(name.partition(" ")[0])
        for rows, pair in points.items() if level else ():
            total = sums[str(level)].setdefault(rows, [0.0, 0.0])
            total[0], total[1] = total[0] + pair[0], total[1] + pair[1]
    return {
        level: {rows: round(total[0] / total[1], 3) for rows, total in sorted(points.items(), key=lambda x: int(x[0]))}
        for level, points in sums.items()
        if points
    }


def complete(record: dict[str, Any], config: ModelConfig, say: Callable[[str], None] = lambda line: None) -> None:
    """Adds to the record of the proof in force the prices that it lacks, and keeps it.

    A family that cannot be timed here (memory, no native kernel) is said and left out until the next start: a price is
    no proof.
    """
    priced = record.setdefault("priced", [])
    missing = [family for family in FAMILIES if family not in priced]
    if missing:
        say(f"timing what the kept proof has no price of: {', '.join(missing)}")
        found, timed = operators(config, Inputs(), missing, say)
        record["prices"] |= {name: {str(rows): pair for rows, pair in points.items()} for name, points in found.items()}
        priced += timed
    record["levels"] = levels(record["prices"])
    if missing:
        write_record(record)


def operators(
    config: ModelConfig, inputs: Inputs, wanted: Sequence[str], say: Callable[[str], None]
) -> tuple[Prices, list[str]]:
    """(times of a model's operators on this GPU, the families that were timed in full); some seconds."""
    found: Prices = {}
    timed, families = [], {"attention": _attention, "decode": _decode, "rows": _rows, "logp": _logp}
    for name in wanted:
        try:
            for operator, rows, ours, native in families[name](config, inputs):
                found.setdefault(operator, {})[rows] = (round(ours, 2), round(native, 2))
            timed.append(name)
        except Exception as error:
            say(f"{name} is not priced: {type(error).__name__}: {str(error)[:160]}")
        torch.cuda.empty_cache()
    return found, timed


def _best(ours: Sequence[Run], natives: Sequence[Sequence[Run]], *, graph: bool) -> tuple[float, float]:
    """Microseconds a call of (ours, the fastest native)."""
    contestants = {"ours": ours, **{str(i): runs for i, runs in enumerate(natives)}}
    times = microseconds(contestants, SECONDS, graph=graph)
    mine = times.pop("ours")
    return mine, min(times.values())


def _works(run: Run) -> bool:
    """Whether a backend of torch's attention takes these tensors."""
    try:
        run()
    except RuntimeError:
        return False
    return True


def _dense(x: Tensor) -> Tensor:
    """[1, heads, T, D] of [T, heads, D]."""
    return x.transpose(0, 1)[None]


def _attention(config: ModelConfig, inputs: Inputs) -> Iterator[Row]:
    for tokens in PACKED:
        yield from _packed(config, inputs, tokens)


def _packed(config: ModelConfig, inputs: Inputs, tokens: int) -> Iterator[Row]:
    ours, layout = provider("attention", uniform("gpu")["attention"]), PackedLayout((tokens,), (1,))
    q, dout = (inputs.normal(tokens, config.heads, config.head_dim) for _ in range(2))
    k, v = (inputs.normal(tokens, config.kv_heads, config.head_dim) for _ in range(2))
    natives = [_sdpa(backend, q, k, v, dout) for backend in BACKENDS[:2]]
    forwards = [[forward] * 4 for forward, _ in natives if _works(forward)]
    runs: list[Run] = [lambda: ours.forward_packed(q, k, v, layout)] * 4
    yield (f"attention {_heads(config)}", tokens, *_best(runs, forwards, graph=False))
    out, lse = ours.forward_packed(q, k, v, layout)
    backwards = [[backward] * 4 for _, backward in natives if _works(backward)]
    runs = [lambda: ours.backward_packed(dout, q, k, v, out, lse, layout)] * 4
    yield (f"attention-backward {_heads(config)}", tokens, *_best(runs, backwards, graph=False))


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Run, Run]:
    """(forward, backward) of causal attention; the backward keeps one forward's graph."""
    inputs = [_dense(x).detach().requires_grad_() for x in (q, k, v)]
    kept: list[Tensor] = []

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)

    def forward() -> None:
        with torch.no_grad():
            run()

    def backward() -> None:
        if not kept:
            kept.append(run())
        torch.autograd.grad(kept[0], inputs, _dense(dout), retain_graph=True)

    return forward, backward


def _decode(config: ModelConfig, inputs: Inputs) -> Iterator[Row]:
    ours, width = provider("attention", uniform("gpu")["attention"]), config.head_dim
    for samples, length in CACHED:
        shape = (1, config.kv_heads, width, samples * (length // PAGE), PAGE)
        cache = ours.new_cache(*shape, inputs.random.device)
        for pages in (cache.k[0], cache.v[0]):
            pages.normal_(generator=inputs.random)
        handles = [cache.join() for _ in range(samples)]
        batch = cache.batch(handles, [length - 1] * samples, [1] * samples)
        q = inputs.normal(samples, config.heads, width)
        k, v = (inputs.normal(samples, config.kv_heads, width) for _ in range(2))
        keys, values = (inputs.normal(samples, config.kv_heads, length, width) for _ in range(2))
        natives = []
        for backend in BACKENDS:
            run = _one_token(backend, q[:, :, None], keys, values)
            if _works(run):
                natives.append([run] * 4)
        runs = [lambda c=cache, b=batch, q=q, k=k, v=v: ours.cached(q, k, v, c, 0, b)] * 4
        yield (f"decode {_heads(config)}, {length} keys", samples, *_best(runs, natives, graph=True))


def _one_token(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Run:
    def run() -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return run


def _rows(config: ModelConfig, inputs: Inputs) -> Iterator[Row]:
    """Two norms with residual, QK norm with RoPE, SwiGLU of one layer: forward, and backward with gains, which few
    tokens would leave waiting for the host."""
    shape = f"hidden {config.hidden}, inner {config.intermediate}"
    for tokens in TOKENS:
        layer = _Layer(config, inputs, tokens)
        yield (f"rows {shape}", tokens, *_best([layer.forward] * 4, [[layer.native_forward] * 4], graph=True))
    layer.train()
    times = _best([layer.backward] * 4, [[layer.native_backward] * 4], graph=False)
    yield (f"rows-backward {shape}", TOKENS[-1], *times)


class _Layer:
    """The row operators of one layer, by our providers and by torch."""

    def __init__(self, config: ModelConfig, inputs: Inputs, tokens: int) -> None:
        c, self.config = config, config
        names = uniform("gpu")
        self.norm, self.rope, self.swiglu = (provider(name, names[name]) for name in ("rms_norm", "rope", "swiglu"))
        self.layout = PackedLayout((tokens,), (1,))
        self.positions = torch.arange(tokens, device="cuda")
        table = RopeTable.build(c.inverse_frequencies(), tokens)
        self.table = RopeTable(table.cosine.cuda(), table.sine.cuda())
        self.x, self.dy, self.branch = (inputs.normal(tokens, c.hidden) for _ in range(3))
        self.branch = self.branch.float()
        self.q, self.dq = (inputs.normal(tokens, c.heads, c.head_dim) for _ in range(2))
        self.k, self.dk = (inputs.normal(tokens, c.kv_heads, c.head_dim) for _ in range(2))
        self.gate_up, self.da = inputs.normal(tokens, 2 * c.intermediate), inputs.normal(tokens, c.intermediate)
        widths = (c.hidden, c.head_dim, c.head_dim)
        self.weights = [Weight("gain", inputs.normal(n), (Part("gain", 0, n),)) for n in widths]
        self.fused = c.qk_norm and can_fuse(c.head_dim)
        self.leaves = [x.detach().requires_grad_() for x in (self.x, self.q, self.k, self.gate_up)]
        self.leaves += [weight.value.detach().requires_grad_() for weight in self.weights[: 3 if c.qk_norm else 1]]

    def train(self) -> None:
        self.outputs = self._native(*self.leaves)
        for weight in self.weights:
            weight.grad = torch.zeros(weight.shape, device="cuda")

    def forward(self) -> None:
        c, (gain, q_gain, k_gain) = self.config, self.weights
        for _ in range(2):
            self.norm.forward_residual(self.x, self.branch, gain, c.norm_eps)
        if self.fused:
            qk_norm_rope(self.q, self.k, q_gain, k_gain, c.norm_eps, self.positions, self.table)
        else:
            for x, weight in ((self.q, q_gain), (self.k, k_gain)):
                normed = self.norm.forward(x, weight, c.norm_eps) if c.qk_norm else x
                self.rope.rotate(normed, self.positions, self.table, 1.0)
        self.swiglu.forward(self.gate_up)

    def backward(self) -> None:
        c, (gain, q_gain, k_gain) = self.config, self.weights
        for _ in range(2):
            self.norm.gradients(self.dy, self.x, gain, c.norm_eps, self.layout)
        if self.fused:
            inputs = (self.dq, self.dk, self.q, self.k, q_gain, k_gain)
            qk_norm_rope_backward(*inputs, c.norm_eps, self.positions, self.table, self.layout)
        else:
            for dy, x, weight in ((self.dq, self.q, q_gain), (self.dk, self.k, k_gain)):
                turned = self.rope.rotate(dy, self.positions, self.table, -1.0)
                if c.qk_norm:
                    self.norm.gradients(turned, x, weight, c.norm_eps, self.layout)
        self.swiglu.backward(self.da, self.gate_up)

    def _native(self, x: Tensor, q: Tensor, k: Tensor, gate_up: Tensor, *gains: Tensor) -> list[Tensor]:
        c, found = self.config, []
        for _ in range(2):
            found.append(functional.rms_norm(x + self.branch.bfloat16(), (c.hidden,), gains[0], c.norm_eps))
        cosine, sine = (torch.cat([x, x], 1).bfloat16()[:, None] for x in (self.table.cosine, self.table.sine))
        for y, gain in zip((q, k), gains[1:] if c.qk_norm else (None, None), strict=True):
            if gain is not None:
                y = functional.rms_norm(y, (c.head_dim,), gain, c.norm_eps)
            half = torch.cat([-y[..., c.head_dim // 2 :], y[..., : c.head_dim // 2]], -1)
            found.append(y * cosine + half * sine)
        gate, up = gate_up.chunk(2, 1)
        return [*found, functional.silu(gate) * up]

    def native_forward(self) -> None:
        with torch.no_grad():
            self._native(*self.leaves)

    def native_backward(self) -> None:
        seeds = [self.dy, self.dy, self.dq, self.dk, self.da]
        torch.autograd.grad(self.outputs, self.leaves, seeds, retain_graph=True)


def _logp(config: ModelConfig, inputs: Inputs) -> Iterator[Row]:
    """Log-probability and entropy from hidden states, the head's products included, and with their gradients: of a
    step's first micro-batch, whose gradients are cleared before it, and of a later one, which adds to them."""
    names, hidden, vocabulary = uniform("gpu"), config.hidden, config.vocabulary
    logp, head = (provider(name, names[name]) for name in ("selected_logp", "lm_head"))
    weight = Weight("head", inputs.normal(vocabulary, hidden, scale=0.02), (Part("head", 0, vocabulary),))
    plain = weight.value.detach().requires_grad_()
    weight.enable_training()

    def native_cleared() -> None:
        plain.grad = None

    for tokens in SCORED:
        x, rows = inputs.normal(tokens, hidden).requires_grad_(), torch.arange(tokens, device="cuda")
        targets = torch.randint(0, vocabulary, (tokens,), generator=inputs.random, device="cuda")
        c, layout = torch.randn(tokens, generator=inputs.random, device="cuda"), PackedLayout((tokens,), (1,))

        def ours(x: Tensor = x, y: Tensor = targets, layout: PackedLayout = layout, rows: Tensor = rows) -> Tensor:
            found: Tensor = logp.score(x, weight, y, 1.0, None, layout, rows, head)[0]
            return found

        def native(x: Tensor = x, y: Tensor = targets) -> Tensor:
            logps = (x @ plain.T).float().log_softmax(-1)
            with torch.no_grad():
                (logps.exp() * logps).sum(-1)
            return logps.gather(1, y[:, None])[:, 0]

        def without(run: Callable[[], Tensor]) -> Run:
            def forward() -> None:
                with torch.no_grad():
                    run()

            return forward

        def trained(run: Callable[[], Tensor], before: Run, x: Tensor = x, c: Tensor = c) -> Run:
            def both() -> None:
                before()
                run().backward(c)
                x.grad = None

            return both

        first = trained(ours, weight.clear_gradient), trained(native, native_cleared)
        later = trained(ours, lambda: weight.grad), trained(native, lambda: None)  # read: no logits are kept in it
        shape = f"{hidden} x {vocabulary}"
        yield (f"logp {shape}", tokens, *_best([without(ours)], [[without(native)]], graph=False))
        for name, (a, b) in {"logp-first": first, "logp-later": later}.items():
            yield (f"{name} {shape}", tokens, *_best([a], [[b]], graph=False))


def _heads(config: ModelConfig) -> str:
    return f"{config.heads} and {config.kv_heads} heads of {config.head_dim}"
