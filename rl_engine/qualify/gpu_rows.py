"""Row operators on the GPU, bit for bit against the plain-torch reference on a CPU where torch can write them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.models.config import ModelConfig
from rl_engine.ops.adamw import AdamScalars
from rl_engine.ops.grad_norm import BIAS_SQUARED, joined
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider
from rl_engine.ops.rms_norm import as_heads
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.rope.triton import can_fuse, qk_norm_rope, qk_norm_rope_backward
from rl_engine.ops.sample import DrawKey
from rl_engine.ops.triton_functions import exp, launch, reciprocal
from rl_engine.ops.weight import Part, Weight
from rl_engine.qualify.cases import Case, close
from rl_engine.qualify.gpu.data import Inputs, differing

LAYOUT = PackedLayout((1, 17, 85, 200), (1, 3))


PARTS = ("norms", "rotation", "swiglu", "update", "draws")


def _case(operator: str, what: str, found: Tensor, expected: Tensor, control: bool = False) -> Case:
    return Case(operator, "triton", what, expected.numel(), differing(found.cpu(), expected.cpu()), control)


def _pair(inputs: Inputs, width: int) -> tuple[Weight, Weight]:
    """A gain on the device and the same on the CPU, both training from 1/2."""
    value = inputs.normal(width)
    both = (Weight("gain", value, (Part("gain", 0, width),)), Weight("gain", value.cpu(), (Part("gain", 0, width),)))
    for weight in both:
        weight.grad = torch.full((width,), 0.5, device=weight.value.device)
    return both


def norms(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    tested, reference = provider("rms_norm", "triton"), provider("rms_norm", "reference")
    x, dy = (inputs.normal(LAYOUT.tokens, config.hidden) for _ in range(2))
    here, there = _pair(inputs, config.hidden)
    eps = config.norm_eps
    yield _case("rms_norm", "forward", tested.forward(x, here, eps), reference.forward(x.cpu(), there, eps))
    expected = reference.gradients(dy.cpu(), x.cpu(), there, eps, LAYOUT)
    yield _case("rms_norm", "backward", tested.gradients(dy, x, here, eps, LAYOUT), expected)
    assert here.grad is not None and there.grad is not None
    yield _case("rms_norm", "gain", here.grad, there.grad)
    dx, terms = tested.backward(dy, x, here, eps, True)
    wanted = reference.backward(dy.cpu(), x.cpu(), there, eps, True)[1]
    assert terms is not None and wanted is not None
    yield _case("rms_norm", "backward alone", tested.backward(dy, x, here, eps, False)[0], expected)
    yield _case("rms_norm", "backward that keeps the gain's terms", dx, expected)
    yield _case("rms_norm", "gain's terms", terms, wanted)
    branch = torch.randn(x.shape, generator=inputs.random, device=x.device)
    stream = (x.float() + branch).bfloat16()
    added, normed = tested.forward_residual(x, branch, here, eps)
    yield _case("rms_norm", "residual", added, stream)
    yield _case("rms_norm", "forward behind the residual", normed, reference.forward(stream.cpu(), there, eps))
    gain = there.grad.clone()
    here.grad.fill_(0.5)
    joined = tested.backward_with_gain(dy, x, here, eps, LAYOUT, stream)
    yield _case("rms_norm", "backward with residual", joined, (stream.cpu().float() + expected.float()).bfloat16())
    yield _case("rms_norm", "gain beside the residual", here.grad, gain)
    terms = as_heads(inputs.order_revealing(config.hidden, LAYOUT.tokens).T.float().contiguous())
    expected = reference.unit_sums(terms.cpu(), LAYOUT)
    yield _case("rms_norm", "order-revealing gain terms", tested.unit_sums(terms, LAYOUT), expected)
    plain = torch.stack([terms[a:b].sum(0) for a, b in LAYOUT.unit_bounds])
    yield _case("rms_norm", "torch's sum of gain terms", plain, expected, control=True)


def rotation(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
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
    grads = inputs.normal(*q.shape), inputs.normal(*k.shape)
    pairs = _pair(inputs, width), _pair(inputs, width)
    weights = tuple(pair[0] for pair in pairs)
    for name, x, dy, (here, cpu) in zip("qk", (q, k), grads, pairs, strict=True):
        expected = norm.forward(x.cpu(), cpu, eps)
        yield _case("qk_norm", f"forward, {name}", provider("qk_norm", "triton").forward(x, here, eps), expected)
        turned = rope.rotate(dy.cpu(), LAYOUT.positions, table, -1.0)
        expected = norm.gradients(turned, x.cpu(), cpu, eps, LAYOUT)
        found = provider("qk_norm", "triton").gradients(turned.to(x.device), x, here, eps, LAYOUT)
        yield _case("qk_norm", f"backward, {name}", found, expected)
        assert here.grad is not None and cpu.grad is not None
        yield _case("qk_norm", f"gain, {name}", here.grad, cpu.grad)
        here.grad.fill_(0.5)
    if not can_fuse(width):
        return
    joined = qk_norm_rope(q, k, *weights, eps, positions, there)
    back = qk_norm_rope_backward(*grads, q, k, *weights, eps, positions, there, LAYOUT)
    frozen = tuple(Weight("gain", weight.value, weight.parts) for weight in weights)
    alone = qk_norm_rope_backward(*grads, q, k, *frozen, eps, positions, there, LAYOUT)
    for i, (name, x, (here, cpu)) in enumerate(zip("qk", (q, k), pairs, strict=True)):
        expected = rope.rotate(norm.forward(x.cpu(), cpu, eps), LAYOUT.positions, table, 1.0)
        yield _case("qk_norm", f"with RoPE, {name}", joined[i], expected)
        assert here.grad is not None and cpu.grad is not None
        yield _case("qk_norm", f"with RoPE, gain, {name}", here.grad, cpu.grad)
        cpu.grad.fill_(0.5)
        turned = rope.rotate(grads[i].cpu(), LAYOUT.positions, table, -1.0)
        expected = norm.gradients(turned, x.cpu(), cpu, eps, LAYOUT)
        yield _case("qk_norm", f"with RoPE, backward, {name}", back[i], expected)
        yield _case("qk_norm", f"with RoPE, backward, frozen gains, {name}", alone[i], expected)


@triton.jit
def sigmoid_kernel(x, y, n, C: tl.constexpr):
    """y = 1 / (1 + exp(-x)), fp32: what torch cannot write, since ``exp`` is ``ex2.approx``."""
    at = tl.program_id(0) * C + tl.arange(0, C)
    tl.store(y + at, reciprocal(1.0 + exp(-tl.load(x + at, mask=at < n, other=0.0))), mask=at < n)


def sigmoid(x: Tensor) -> Tensor:
    """fp32, by a kernel that does nothing else."""
    out = torch.empty_like(x)
    launch(sigmoid_kernel, (triton.cdiv(x.numel(), 1024),), x, out, x.numel(), warps=4, C=1024)
    return out


def swiglu(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """The contract's products and sums in torch, on the sigmoid of a kernel of its own; values against fp64; a few
    columns alone, where they lie in other threads."""
    tested, width = provider("swiglu", "triton"), config.intermediate
    x, da = inputs.normal(33, 2 * width, scale=3.0), inputs.normal(33, width)
    out, whole = tested.forward(x), tested.backward(da, x)
    gate, up, d = x[:, :width].float().contiguous(), x[:, width:].float(), da.float()
    sigma = sigmoid(gate)
    h = gate * sigma
    slope = d * up * (sigma * (1.0 + gate * (1.0 - sigma)))
    yield _case("swiglu", "forward", out, (h * up).bfloat16())
    yield _case("swiglu", "backward", whole, torch.cat([slope, d * h], 1).bfloat16())
    g, u = (half.double().requires_grad_() for half in x.chunk(2, 1))
    exact = torch.nn.functional.silu(g) * u
    gradient = torch.cat(torch.autograd.grad(exact, (g, u), da.double()), 1)
    yield close("swiglu", "forward, fp64", out, exact.detach(), 2**-8, 1e-9)
    yield close("swiglu", "backward, fp64", whole, gradient, 2**-7, 1e-5)
    cut = max(width - 5, 1)
    part = torch.cat([x[:, width - cut : width], x[:, 2 * width - cut :]], 1)
    yield _case("swiglu", "forward, columns alone", tested.forward(part), out[:, width - cut :])
    found = tested.backward(da[:, width - cut :].contiguous(), part)
    expected = torch.cat([whole[:, width - cut : width], whole[:, 2 * width - cut :]], 1)
    yield _case("swiglu", "backward, columns alone", found, expected)


def update(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
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
    changed = provider("adamw", "triton").update(*here, 0.7, scalars)
    expected = provider("adamw", "reference").update(*there, 0.7, scalars)
    for name, a, b in zip(("master", "m", "v", "gradient", "weight"), here, there, strict=True):
        yield _case("adamw", name, a, b)
    yield Case("adamw", "triton", "weights that changed", 1, int(int(changed) != int(expected)))
    yield from sums(inputs)


def sums(inputs: Inputs) -> Iterator[Case]:
    """The norm's sums of squares as integers; fp64 sums of the same squares must differ."""
    tested, reference = provider("grad_norm", "triton"), provider("grad_norm", "reference")

    def powers(least: int, most: int, n: int) -> Tensor:
        exponents = torch.randint(least, most, (n,), generator=inputs.random, device=inputs.random.device)
        return torch.exp2(exponents.double()).float()

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=inputs.random, device=inputs.random.device)

    mixed = normal(50_003) * powers(-40, 6, 50_003)
    mixed[::7], mixed[::11] = 0.0, 1e-42
    levels = powers(-149, 128, 277).sort().values.repeat_interleave(700) * 1.75
    kinds = {
        "normal": normal(1 << 20),
        "one": normal(1),
        "mixed exponents": mixed,
        "every exponent": normal(100_003).clamp(-1.9, 1.9) * powers(-149, 127, 100_003),
        "rising": levels,
        "falling": levels.flip(0),
        "subnormal": normal(70_001) * 1e-41,
        "largest": torch.full_like(mixed, 3.4028234663852886e38),
        "zeros": -torch.zeros_like(mixed),
    }
    found, expected = ({k: provider.bins(x.to(place)) for k, x in kinds.items()}
                       for provider, place in ((tested, inputs.random.device), (reference, "cpu")))  # fmt: skip
    for kind in kinds:
        yield Case("grad_norm", "triton", kind, 1, int(joined(found[kind]) != joined(expected[kind])))
    together = joined(tested.bins(*kinds.values()))
    yield Case("grad_norm", "triton", "all in one", 1, int(together != sum(map(joined, expected.values()))))
    rounded = int(mixed.double().square().sum().item() * 2.0**BIAS_SQUARED)
    yield Case(
        "grad_norm", "triton", "torch's sum in fp64", 1, int(rounded != joined(expected["mixed exponents"])), True
    )
    for value in (math.inf, -math.inf, math.nan):
        mixed[-1] = value
        yield Case("grad_norm", "triton", f"{value} is seen", 1, int(not tested.bins(mixed)[255].any()))


def draws(config: ModelConfig, inputs: Inputs) -> Iterator[Case]:
    """Tokens of the reference, with a retained set too, and a row alone in bits."""
    del config  # a row of noise has no model's size
    tested, reference = provider("sample", "triton"), provider("sample", "reference")
    z = torch.randn(7, 5003, generator=inputs.random, device=inputs.random.device) * 3
    mask = torch.randint(0, 256, (7, 626), generator=inputs.random, device=z.device).to(torch.uint8)
    keys = [DrawKey(2**32 - 1, 1, 5, 3, position) for position in range(7)]
    for kind, bits in (("", None), (", retained set", mask)):
        score, token = tested.best(z, 0, 0.7, bits, keys)
        expected = reference.best(z.cpu(), 0, 0.7, None if bits is None else bits.cpu(), keys)[1]
        yield Case("sample", "triton", f"tokens{kind}", 7, int((token.cpu() != expected).sum()))
        alone = tested.best(z[4:5], 0, 0.7, None if bits is None else bits[4:5], keys[4:5])[0]
        yield _case("sample", f"a row alone{kind}", alone, score[4:5])
