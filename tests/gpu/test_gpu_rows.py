"""Row operators on a GPU: bits of the reference where torch can write the arithmetic, the anchor's where it cannot."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_engine.ops.grad_norm import NonFiniteGradient, joined
from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider
from rl_engine.ops.rms_norm import as_heads
from rl_engine.ops.rope import RopeTable
from rl_engine.ops.weight import Weight
from tests.helpers.gpu import differing, needs_gpu
from tests.helpers.numeric import assert_bitwise, assert_close
from tests.helpers.ops import (
    bf16_randn,
    draw_keys,
    f32_randn,
    hardest_square,
    in_nan,
    make_weight,
    order_revealing,
    rope_table,
)

pytestmark = [pytest.mark.gpu, needs_gpu]

LAYOUT = PackedLayout((1, 17, 85, 200, 30), (1, 3, 1))


def both(operator: str) -> tuple[Any, Any]:
    return provider(operator, "triton"), provider(operator, "reference")


def same(actual: Tensor, expected: Tensor, what: str) -> None:
    assert_bitwise(actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous(), what)


def gain(width: int, device: str = "cpu") -> Weight:
    return make_weight(bf16_randn(width, seed=5).to(device), trains=False)


def training(weight: Weight, device: str) -> Tensor:
    weight.grad = torch.full((weight.shape[0],), 0.5, device=device)
    return weight.grad


@pytest.mark.parametrize("width", [48, 576, 1024, 1536, 2560, 4096, 5120])
@pytest.mark.parametrize("rows", [1, 3, 333])
def test_norm_has_the_references_bits(width: int, rows: int) -> None:
    tested, reference = both("rms_norm")
    x, dy = bf16_randn(rows, width, seed=1), bf16_randn(rows, width, seed=2)
    cpu, gpu = gain(width), gain(width, "cuda")
    views = in_nan(x.cuda()), in_nan(dy.cuda())
    same(tested.forward(views[0], gpu, 1e-6), reference.forward(x, cpu, 1e-6), "forward")
    expected = reference.backward(dy, x, cpu, 1e-6, True)
    found = tested.backward(views[1], views[0], gpu, 1e-6, True)
    same(found[0], expected[0], "dx")
    same(found[1], expected[1], "terms")
    same(tested.backward(views[1], views[0], gpu, 1e-6, False)[0], expected[0], "dx alone")
    branch = f32_randn(rows, width, seed=3)
    stream = (x.float() + branch).bfloat16()
    added, normed = tested.forward_residual(views[0], branch.cuda(), gpu, 1e-6)
    same(added, stream, "residual")
    same(normed, reference.forward(stream, cpu, 1e-6), "norm behind the residual")


@pytest.mark.parametrize("width", [576, 2560, 4096])
def test_gain_gradient_has_the_references_bits(width: int) -> None:
    """The pass that sums pieces on the way, the one that stores terms, and the reference; also with the residual."""
    tested, reference = both("rms_norm")
    x, dy = bf16_randn(LAYOUT.tokens, width, seed=1), bf16_randn(LAYOUT.tokens, width, seed=2)
    cpu, gpu = gain(width), gain(width, "cuda")
    expected_grad, grad = training(cpu, "cpu"), training(gpu, "cuda")
    expected = reference.gradients(dy, x, cpu, 1e-6, LAYOUT)
    same(tested.gradients(dy.cuda(), x.cuda(), gpu, 1e-6, LAYOUT), expected, "dx")
    same(grad, expected_grad, "gain")
    training(gpu, "cuda")
    stream = bf16_randn(LAYOUT.tokens, width, seed=4)
    joined = tested.backward_with_gain(dy.cuda(), x.cuda(), gpu, 1e-6, LAYOUT, stream.cuda())
    same(joined, (stream.float() + expected.float()).bfloat16(), "residual's gradient")
    assert gpu.grad is not None
    same(gpu.grad, expected_grad, "gain beside the residual")
    terms = reference.backward(dy, x, cpu, 1e-6, True)[1]
    same(
        tested.unit_sums(as_heads(terms).cuda(), LAYOUT), reference.unit_sums(as_heads(terms), LAYOUT), "sums of units"
    )


def test_sums_of_units_show_their_order() -> None:
    tested, reference = both("rms_norm")
    terms = as_heads(order_revealing(40, LAYOUT.tokens, seed=3).T.float().contiguous())
    expected = reference.unit_sums(terms, LAYOUT)
    same(tested.unit_sums(terms.cuda(), LAYOUT), expected, "order-revealing terms")
    first = torch.stack([terms[a:b].sum(0) for a, b in LAYOUT.unit_bounds])
    assert differing(first, expected) > 10, "the control: torch's sum"


def test_row_sums_show_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the library's sum over several warps in the norm's place for the tree."""
    from rl_engine.ops.rms_norm import triton as norms
    from rl_engine.qualify.gpu_attention import library_sum, replaced

    tested, reference = both("rms_norm")
    x, dy, cpu, gpu = bf16_randn(64, 4096, seed=1), bf16_randn(64, 4096, seed=2), gain(4096), gain(4096, "cuda")
    expected = reference.backward(dy, x, cpu, 1e-6, True)[1]
    assert expected is not None
    rows = replaced(norms.backward_rows, row_mean=replaced(norms.row_mean, tree_rows=library_sum))
    with monkeypatch.context() as patch:
        patch.setattr(norms, "rms_norm_bwd_kernel", replaced(norms.rms_norm_bwd_kernel, backward_rows=rows))
        found = tested.backward(dy.cuda(), x.cuda(), gpu, 1e-6, True)[1]
    assert differing(found, expected) > 100


@pytest.mark.parametrize("width", [64, 128, 80])
def test_rope_has_the_references_bits(width: int) -> None:
    tested, reference = both("rope")
    x, table = bf16_randn(LAYOUT.tokens, 5, width, seed=1), rope_table(width, 300)
    there = RopeTable(table.cosine.cuda(), table.sine.cuda())
    for sign in (1.0, -1.0):
        found = tested.rotate(in_nan(x.cuda()), LAYOUT.positions.cuda(), there, sign)
        same(found, reference.rotate(x, LAYOUT.positions, table, sign), f"sign {sign}")


@pytest.mark.parametrize("width", [64, 128])
def test_fused_qk_norm_and_rope_have_the_separate_operators_bits(width: int) -> None:
    from rl_engine.ops.rope.triton import qk_norm_rope, qk_norm_rope_backward

    norm, rope = provider("rms_norm", "reference"), provider("rope", "reference")
    q, k = bf16_randn(LAYOUT.tokens, 6, width, seed=1), bf16_randn(LAYOUT.tokens, 2, width, seed=2)
    dq, dk = bf16_randn(LAYOUT.tokens, 6, width, seed=3), bf16_randn(LAYOUT.tokens, 2, width, seed=4)
    table, positions = rope_table(width, 300), LAYOUT.positions
    there = RopeTable(table.cosine.cuda(), table.sine.cuda())
    weights, gpu = [gain(width), gain(width)], [gain(width, "cuda"), gain(width, "cuda")]
    found = qk_norm_rope(in_nan(q.cuda()), in_nan(k.cuda()), *gpu, 1e-6, positions.cuda(), there)
    for a, x, w in zip(found, (q, k), weights, strict=True):
        same(a, rope.rotate(norm.forward(x, w, 1e-6), positions, table, 1.0), "forward")
    grads = [training(w, "cuda") for w in gpu]
    inputs = (in_nan(dq.cuda()), in_nan(dk.cuda()), in_nan(q.cuda()), in_nan(k.cuda()))
    found = qk_norm_rope_backward(*inputs, *gpu, 1e-6, positions.cuda(), there, LAYOUT)
    for a, d, x, w, grad in zip(found, (dq, dk), (q, k), weights, grads, strict=True):
        expected_grad = training(w, "cpu")
        expected = norm.gradients(rope.rotate(d, positions, table, -1.0), x, w, 1e-6, LAYOUT)
        same(a, expected, "backward")
        same(grad, expected_grad, "gain")
    frozen = [gain(width, "cuda"), gain(width, "cuda")]
    for a, b in zip(qk_norm_rope_backward(*inputs, *frozen, 1e-6, positions.cuda(), there, LAYOUT), found, strict=True):
        same(a, b, "backward, frozen gains")


@pytest.mark.parametrize("width", [1, 300, 1537, 12288])
def test_swiglu(width: int) -> None:
    """Values against fp64; bits against another cut, where a column lies in another thread and warp."""
    tested, _ = both("swiglu")
    x, da = bf16_randn(37, 2 * width, seed=1, scale=3.0).cuda(), bf16_randn(37, width, seed=2).cuda()
    found, dx = tested.forward(x), tested.backward(da, x)
    g, u = (half.double().requires_grad_() for half in x.chunk(2, 1))
    expected = torch.nn.functional.silu(g) * u
    expected.backward(da.double())
    assert_close(found.cpu(), expected.detach().cpu(), rtol=2**-8, atol=1e-9, why="one bf16 rounding")
    gradient = torch.cat([g.grad, u.grad], 1)  # type: ignore[list-item]
    assert_close(
        dx.cpu(), gradient.cpu(), rtol=2**-7, atol=1e-5, why="one bf16 rounding, cancellation in 1 + g (1 - s)"
    )
    shifted = max(width - 5, 1)
    part = torch.cat([x[:, width - shifted : width], x[:, 2 * width - shifted :]], 1)[3:4]
    same(tested.forward(part), found[3:4, width - shifted :], "other columns and rows beside")


def test_embedding_gradient() -> None:
    tested, reference = both("embedding")
    ids = torch.randint(0, 20, (400,), generator=torch.Generator().manual_seed(1))
    rows = order_revealing(700, 400, seed=3).T.contiguous()
    expected, found = f32_randn(30, 700, seed=4), f32_randn(30, 700, seed=4).cuda()
    reference.lookup_gradient(ids, rows, expected)
    tested.lookup_gradient(ids.cuda(), rows.cuda(), found)
    same(found, expected, "chains")
    cpu, gpu = make_weight(bf16_randn(30, 700, seed=5)), make_weight(bf16_randn(30, 700, seed=5).cuda(), trains=False)
    assert cpu.grad is not None
    cpu.grad += 0.5
    gpu.grad = torch.full((30, 700), 0.5, device="cuda")
    cpu.lookups, gpu.lookups = [(ids, rows), (ids, rows)], [(ids.cuda(), rows.cuda())] * 2
    reference.finish(cpu)
    tested.finish(gpu)
    same(gpu.grad, cpu.grad, "finish")
    assert gpu.lookups == []
    torch_sum = torch.zeros(30, 700).index_add(0, ids, rows.float())
    chained = torch.zeros(30, 700)
    reference.lookup_gradient(ids.flip(0), rows.flip(0), chained)
    assert differing(chained, torch_sum) > 50, "the control: tokens in another order"


def test_more_rows_than_an_axis_of_a_grid_holds() -> None:
    """70,000 tokens of an update: CUDA's second axis ends at 65,535."""
    rows, tested = 70_000, provider("swiglu", "triton")
    x, da = (torch.randn(rows, width, device="cuda").bfloat16() for width in (128, 64))
    out, dx = tested.forward(x), tested.backward(da, x)
    same(out[-9:], tested.forward(x[-9:]), "forward")
    same(dx[-9:], tested.backward(da[-9:], x[-9:]), "backward")
    ids = torch.arange(rows, device="cuda") % 3000
    found, expected = torch.zeros(3000, 64, device="cuda"), torch.zeros(3000, 64)
    provider("embedding", "triton").lookup_gradient(ids, da, found)
    provider("embedding", "reference").lookup_gradient(ids.cpu(), da.cpu(), expected)
    same(found, expected, "lookups")


def test_adamw_has_the_references_bits() -> None:
    from rl_engine.ops.adamw import AdamScalars

    def updated(name: str, device: str) -> list[Tensor]:
        state = [f32_randn(5001, seed=1), f32_randn(5001, seed=2) * 1e-2, f32_randn(5001, seed=3).abs() * 1e-3]
        state = [x.to(device) for x in (*state, f32_randn(5001, seed=4), torch.zeros(5001).bfloat16())]
        for step in (1, 2, 3):
            count = provider("adamw", name).update(*state, 0.7, AdamScalars.at(step, 1e-3, 0.9, 0.95, 1e-8, 0.1))
        return [*state, count]

    for a, b in zip(updated("triton", "cuda"), updated("reference", "cpu"), strict=True):
        same(a, b, "AdamW")


@pytest.mark.parametrize("size", [1, 8192, 100_003])
def test_sum_of_squares_is_exact(size: int) -> None:
    tested, reference = both("grad_norm")
    powers = torch.randint(-40, 6, (size,), generator=torch.Generator().manual_seed(1))
    grad = f32_randn(size, seed=2) * torch.exp2(powers.float())
    grad[::7], grad[::11] = 0.0, 1e-42
    assert joined(tested.bins(grad.cuda())) == joined(reference.bins(grad))
    assert joined(tested.bins(grad.cuda(), grad[:1].cuda())) == joined(reference.bins(grad, grad[:1]))
    for bad in (math.inf, -math.inf, math.nan):
        grad[-1] = bad
        with pytest.raises(NonFiniteGradient):
            joined(tested.bins(grad.cuda()))


@pytest.mark.parametrize("value", [1.9999999, 3.4028234663852886e38, 1.4e-45])
def test_many_equal_elements_fit(value: float) -> None:
    """More of them than one 64-bit sum of whole squares could hold, and each sum of a thread near its limit."""
    tested, reference = both("grad_norm")
    grad = torch.full((1 << 22,), value)
    assert joined(tested.bins(grad.cuda())) == joined(reference.bins(grad))


@pytest.mark.parametrize("above", [0, 7, 18, 19, 20, 21, 38])
def test_sums_hold_as_many_squares_as_they_may(above: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one program, twice as often as it may without being emptied; the first step places the window around 1."""
    from rl_engine.ops.grad_norm import triton as code

    monkeypatch.setattr(code, "PROGRAMS", 1)
    step, squares = code.ELEMENTS * code.LOADS, code.ADDENDS.value * code.ELEMENTS
    first = 127 - code.SPAN.value // 2
    grad = torch.full((2 * squares + 3,), hardest_square(first + above, first, code.GAP.value), device="cuda")
    grad[:step] = 1.0
    assert joined(code.TritonNormBins().bins(grad)) == joined(provider("grad_norm", "reference").bins(grad.cpu()))


@pytest.mark.parametrize("scale", [4.0, 12.0, 30.0])
def test_windows_move_over_steps_of_mixed_scale(scale: float) -> None:
    """Elements of one step fill several windows, and those of the largest exponents fit none; zeros between them."""
    tested, reference = both("grad_norm")
    grad = f32_randn(70_001, seed=1) * torch.exp(f32_randn(70_001, seed=2) * scale)
    grad[::5] = 0.0
    grad[:4096:3] = 3.4028234663852886e38
    grad[4096:8192] = 1.0
    grad[8000], grad[8001] = 1.4e-45, -3e38
    grad = grad.nan_to_num(posinf=3e38, neginf=-3e38)
    assert joined(tested.bins(grad.cuda())) == joined(reference.bins(grad))


def test_draws_depend_on_identity_alone() -> None:
    tested, reference = both("sample")
    z, keys = f32_randn(9, 5003, seed=1, scale=3.0), draw_keys(9, seed=2**32 - 1, step=1, prompt=5, sample=3)
    mask = torch.randint(0, 256, (9, 626), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    for given in (None, mask):
        there = None if given is None else given.cuda()
        score, token = tested.best(z.cuda(), 0, 0.7, there, keys)
        expected_score, expected = reference.best(z, 0, 0.7, given, keys)
        assert_bitwise(token.cpu(), expected, "tokens")
        assert_close(score.cpu(), expected_score, rtol=1e-5, atol=1e-5, why="the device's log and log1p")
        for row in (0, 4):
            only = None if there is None else there[row : row + 1]
            alone = tested.best(z[row : row + 1].cuda(), 0, 0.7, only, keys[row : row + 1])
            same(alone[0], score[row : row + 1], "a row alone")
        cut = [tested.best(z[:, a:b].contiguous().cuda(), a, 0.7, there, keys) for a, b in ((0, 2500), (2500, 5003))]
        best = torch.where(cut[1][0] > cut[0][0], cut[1][1], cut[0][1])
        same(best, token, "shards")
    empty = torch.zeros(9, 626, dtype=torch.uint8).cuda()
    score, token = tested.best(z.cuda(), 0, 0.7, empty, keys)
    assert bool((token == -1).all()) and bool((score == -math.inf).all())


def test_retained_set_on_the_device() -> None:
    from rl_engine.ops.sample.retained import retained_mask

    z = (f32_randn(4, 5003, seed=1, scale=3.0) * 8).round() / 8  # ties
    for top_k, top_p in ((50, 1.0), (-1, 0.9), (100, 0.5), (1, 1.0)):
        found, expected = retained_mask(z.cuda(), 0.7, top_k, top_p), retained_mask(z, 0.7, top_k, top_p)
        assert found is not None and expected is not None
        bits = torch.bitwise_xor(found.cpu(), expected)
        wrong = sum(int(x).bit_count() for x in bits.flatten().tolist())
        assert wrong <= (0 if top_p == 1.0 else 4), "the device's exp may move the last column of a prefix"
