"""Row operators on the GPU, bit for bit against the plain-torch reference on a CPU where torch can write them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.ops.adamw import AdamScalars
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider
from rl_engine.ops.rms_norm import as_heads
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.rope.triton import can_fuse, qk_norm_rope
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.weight import Part, Weight
from rl_engine.qualify.gpu.data import Inputs, differing
from rl_engine.qualify.gpu.products import Case

LAYOUT = PackedLayout((1, 17, 85, 200), (1, 3))


def prove(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """Norms, rotation, update and draws at the model's widths, on a few hundred tokens."""
    yield from _norm(config, inputs)
    yield from _rotation(config, inputs)
    yield from _swiglu(config, inputs)
    yield from _update(config, inputs)
    yield from _draws(inputs)


def _case(operator: str, what: str, found: Tensor, expected: Tensor, control: bool = False) -> Case:
    return Case(operator, "triton", what, expected.numel(), differing(found.cpu(), expected.cpu()), control)


def _pair(inputs: Inputs, width: int) -> tuple[Weight, Weight]:
    """A gain on the device and the same on the CPU, both training from 1/2."""
    value = inputs.normal(width)
    both = (Weight("gain", value, (Part("gain", 0, width),)), Weight("gain", value.cpu(), (Part("gain", 0, width),)))
    for weight in both:
        weight.grad = torch.full((width,), 0.5, device=weight.value.device)
    return both


def _norm(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    tested, reference = provider("rms_norm", "triton"), provider("rms_norm", "reference")
    x, dy = (inputs.normal(LAYOUT.tokens, config.hidden) for _ in range(2))
    here, there = _pair(inputs, config.hidden)
    eps = config.norm_eps
    yield _case("rms_norm", "forward", tested.forward(x, here, eps), reference.forward(x.cpu(), there, eps))
    expected = reference.gradients(dy.cpu(), x.cpu(), there, eps, LAYOUT)
    yield _case("rms_norm", "backward", tested.gradients(dy, x, here, eps, LAYOUT), expected)
    assert here.grad is not None and there.grad is not None
    yield _case("rms_norm", "gain", here.grad, there.grad)
    terms = as_heads(inputs.order_revealing(config.hidden, LAYOUT.tokens).T.float().contiguous())
    expected = reference.unit_sums(terms.cpu(), LAYOUT)
    yield _case("rms_norm", "order-revealing gain terms", tested.unit_sums(terms, LAYOUT), expected)
    plain = torch.stack([terms[a:b].sum(0) for a, b in LAYOUT.unit_bounds])
    yield _case("rms_norm", "torch's sum of gain terms", plain, expected, control=True)


def _rotation(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    width, heads, eps = config.head_dim, 2 * (config.heads // config.kv_heads), config.norm_eps
    norm, rope = provider("qk_norm", "reference"), provider("rope", "reference")
    table = RopeTable.build(config.inverse_frequencies(), 256)
    there = RopeTable(table.cosine.to(inputs.random.device), table.sine.to(inputs.random.device))
    q, k = inputs.normal(LAYOUT.tokens, heads, width), inputs.normal(LAYOUT.tokens, 2, width)
    positions = LAYOUT.positions.to(inputs.random.device)
    for sign in (1.0, -1.0):
        found = provider("rope", "triton").rotate(q, positions, there, sign)
        yield _case("rope", f"sign {sign:+.0f}", found, rope.rotate(q.cpu(), LAYOUT.positions, table, sign))
    if not config.qk_norm:
        return
    (wq, cpu_q), (wk, cpu_k) = _pair(inputs, width), _pair(inputs, width)
    normed = norm.forward(q.cpu(), cpu_q, eps)
    yield _case("qk_norm", "forward", provider("qk_norm", "triton").forward(q, wq, eps), normed)
    if can_fuse(width):
        found = qk_norm_rope(q, k, wq, wk, eps, positions, there)
        yield _case("qk_norm", "with RoPE, q", found[0], rope.rotate(normed, LAYOUT.positions, table, 1.0))
        normed = norm.forward(k.cpu(), cpu_k, eps)
        yield _case("qk_norm", "with RoPE, k", found[1], rope.rotate(normed, LAYOUT.positions, table, 1.0))


def _swiglu(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """torch cannot write ``ex2.approx``: a few columns alone against the whole row, where they lie in other threads."""
    tested, width = provider("swiglu", "triton"), config.intermediate
    x, da = inputs.normal(33, 2 * width, scale=3.0), inputs.normal(33, width)
    cut = max(width - 5, 1)
    part = torch.cat([x[:, width - cut : width], x[:, 2 * width - cut :]], 1)
    yield _case("swiglu", "forward, columns alone", tested.forward(part), tested.forward(x)[:, width - cut :])
    found, whole = tested.backward(da[:, width - cut :].contiguous(), part), tested.backward(da, x)
    expected = torch.cat([whole[:, width - cut : width], whole[:, 2 * width - cut :]], 1)
    yield _case("swiglu", "backward, columns alone", found, expected)


def _update(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    device = inputs.random.device
    ids = torch.randint(0, 20, (400,), generator=inputs.random, device=device)
    rows = inputs.order_revealing(config.hidden, 400).T.contiguous()
    found, expected = torch.zeros(30, config.hidden, device=device), torch.zeros(30, config.hidden)
    provider("embedding", "triton").lookup_gradient(ids, rows, found)
    provider("embedding", "reference").lookup_gradient(ids.cpu(), rows.cpu(), expected)
    yield _case("embedding", "chains", found, expected)
    scalars = AdamScalars.at(3, 1e-3, 0.9, 0.95, 1e-8, 0.1)
    state = [torch.randn(5001, generator=inputs.random, device=device) for _ in range(4)]
    state[2] = state[2].abs()
    here, there = ([*(x.to(where).clone() for x in state), torch.zeros(5001).bfloat16().to(where)]
                   for where in (device, torch.device("cpu")))  # fmt: skip
    provider("adamw", "triton").update(*here, 0.7, scalars)
    provider("adamw", "reference").update(*there, 0.7, scalars)
    for name, a, b in zip(("master", "m", "v", "gradient", "weight"), here, there, strict=True):
        yield _case("adamw", name, a, b)
    grad = state[3] * torch.exp2(torch.randint(-40, 6, (5001,), generator=inputs.random, device=device).float())
    grad[::7], grad[::11] = 0.0, 1e-42
    bins = (provider("grad_norm", name).bins(x) for name, x in (("triton", grad), ("reference", grad.cpu())))
    found, expected = bins
    yield Case("grad_norm", "triton", "bins", expected.numel(), int((found.cpu() != expected).sum()))


def _draws(inputs: Inputs) -> Iterator[Case]:
    """Tokens of the reference, and a row alone in bits."""
    z = torch.randn(7, 5003, generator=inputs.random, device=inputs.random.device) * 3
    keys = [DrawKey(2**32 - 1, 1, 5, 3, position) for position in range(7)]
    score, token = provider("sample", "triton").best(z, 0, 0.7, None, keys)
    expected = provider("sample", "reference").best(z.cpu(), 0, 0.7, None, keys)[1]
    yield Case("sample", "triton", "tokens", 7, int((token.cpu() != expected).sum()))
    alone = provider("sample", "triton").best(z[4:5], 0, 0.7, None, keys[4:5])[0]
    yield _case("sample", "a row alone", alone, score[4:5])
