"""Selected logp on a GPU: one result in every schedule, close to fp64, and wrong sums are caught."""

from __future__ import annotations

import itertools

import pytest
import torch

from rl_engine.ops.layout import PackedLayout
from rl_engine.ops.operators import provider
from rl_engine.ops.weight import Part, Weight
from tests.helpers.numeric import assert_bitwise, assert_close

pytest.importorskip("triton")


@pytest.mark.parametrize("vocabulary", [5, 128, 5003, 151936])
def test_every_schedule_has_the_anchors_bits_and_wrong_ones_are_caught(vocabulary: int) -> None:
    from rl_engine.qualify.gpu import logp
    from rl_engine.qualify.gpu.data import Inputs

    cases = list(logp.prove(vocabulary, Inputs(3))) if vocabulary > 1000 else []
    for case in cases:
        assert case.holds, case
    z = torch.randn((3, vocabulary), device="cuda")
    targets = torch.tensor([0, vocabulary - 1, 2], device="cuda")
    found, entropy = provider("selected_logp", "triton").from_logits(z, targets, 1.0, None)
    exact = z.double().log_softmax(1)
    assert_close(found.cpu(), exact.gather(1, targets[:, None])[:, 0].cpu(), rtol=0, atol=2e-5, why="fp32 sums")
    expected = -(exact.exp() * exact).sum(1)
    assert_close(entropy.cpu(), expected.cpu(), rtol=1e-5, atol=2e-5, why="fp32 sums")


def scored(hidden: torch.Tensor, weight: Weight, targets: torch.Tensor, layout: PackedLayout, rows: torch.Tensor):  # type: ignore[no-untyped-def]
    weight.enable_training()
    x = hidden.detach().requires_grad_()
    head, logp = provider("lm_head", "triton"), provider("selected_logp", "triton")
    found, entropy = logp.score(x, weight, targets, 0.9, None, layout, rows, head)
    found.backward(torch.linspace(-1, 1, targets.numel(), device="cuda"))
    return found.detach(), entropy, x.grad, weight.grad


def test_score_forward_and_backward() -> None:
    from rl_engine.qualify.gpu.data import Inputs

    data, vocabulary = Inputs(4), 4000
    weight = Weight("head", data.normal(vocabulary, 256, scale=0.05), (Part("head", 0, vocabulary),))
    hidden = data.normal(150, 256)
    targets = torch.randint(0, vocabulary, (150,), device="cuda")
    layout = PackedLayout((50, 100), (1, 1))
    everything = torch.arange(150, device="cuda")
    found, entropy, dh, dw = scored(hidden, weight, targets, layout, everything)
    exact = (hidden.double() @ weight.value.double().T / 0.9).log_softmax(1)
    assert_close(found.cpu(), exact.gather(1, targets[:, None])[:, 0].cpu(), rtol=0, atol=5e-5, why="fp32 chains")
    c = torch.linspace(-1, 1, 150, device="cuda").double()
    dz = -(exact.exp() - torch.nn.functional.one_hot(targets, vocabulary)) * (c / 0.9)[:, None]
    wanted = dz @ weight.value.double()
    assert_close(dh.cpu(), wanted.cpu(), rtol=2e-2, atol=2e-3 * float(wanted.abs().max()), why="bf16 dz and dH")
    wanted = dz.T @ hidden.double()
    assert_close(dw.cpu(), wanted.cpu(), rtol=2e-2, atol=2e-3 * float(wanted.abs().max()), why="bf16 dz")
    alone = scored(hidden[50:], weight, targets[50:], PackedLayout((100,), (1,)), torch.arange(100, device="cuda"))
    assert_bitwise(alone[0].cpu(), found[50:].cpu(), "the second sample alone")
    assert_bitwise(alone[1].cpu(), entropy[50:].cpu(), "its entropy")
    some = torch.arange(0, 150, 2, device="cuda")
    part = scored(hidden, weight, targets[some], layout, some)
    assert_bitwise(part[0].cpu(), found[some].cpu(), "every second row")
    assert int((part[2][1::2] != 0).sum()) == 0


@pytest.mark.parametrize("vocabulary", [777, 4000])
def test_score_with_a_retained_set(vocabulary: int) -> None:
    """From hidden states: the anchor's logits through the whole-row form, group chains and unit folds, and fp64."""
    from rl_engine.ops import triton_gemm
    from rl_engine.ops.selected_logp import LogpState, inverse_temperature
    from rl_engine.ops.selected_logp.vocabulary import groups
    from rl_engine.qualify.gpu.data import Inputs
    from rl_engine.qualify.gpu.logp import random_mask

    anchor, temperature = triton_gemm.Tile(64, 64, 64, 4, 3), 0.9

    def fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.full((a.shape[0], b.shape[0]), torch.nan, device="cuda")
        triton_gemm.product(a, b, out, anchor)
        return out

    data, logp, head = Inputs(5), provider("selected_logp", "triton"), provider("lm_head", "triton")
    weight = Weight("head", data.normal(vocabulary, 256, scale=0.05), (Part("head", 0, vocabulary),))
    hidden, layout = data.normal(150, 256), PackedLayout((1, 49, 100), (2, 1))
    rows = torch.arange(150, device="cuda")[torch.arange(150, device="cuda") % 3 != 1]
    targets = torch.randint(0, vocabulary, (rows.numel(),), generator=data.random, device="cuda")
    mask = random_mask(targets, vocabulary, data)
    mask[7] = 0
    mask[7, int(targets[7]) // 8] = 1 << int(targets[7]) % 8
    nobody = int((targets.max() + 3) % vocabulary)
    mask[:, nobody // 8] &= 255 - (1 << nobody % 8)
    targets = torch.where(targets == nobody, int(targets[7]), targets)
    mask[torch.arange(rows.numel(), device="cuda"), targets // 8] |= (1 << (targets % 8)).to(torch.uint8)
    c = torch.linspace(-1, 1, rows.numel(), device="cuda")
    weight.enable_training()
    x = hidden.detach().requires_grad_()
    found, entropy = logp.score(x, weight, targets, temperature, mask, layout, rows, head)
    found.backward(c)

    chosen = hidden[rows]
    z, state = fp32(chosen, weight.value), LogpState.empty(rows.numel(), hidden.device)
    rowwise = logp.from_logits(z, targets, temperature, mask)
    for name, one, other in zip(("logp", "entropy"), (found, entropy), rowwise, strict=True):
        assert_bitwise(one.detach().cpu(), other.cpu(), f"{name} of whole rows")
    assert float(found.detach()[7]) == 0.0 and float(entropy[7]) == 0.0, "a set of one column"
    inv_t = inverse_temperature(temperature)
    logp.merge_columns(z, 0, vocabulary, inv_t, mask, targets, state)
    dh, dw = torch.zeros(chosen.shape, device="cuda"), torch.zeros(weight.shape, device="cuda")
    units = [int((rows < end).sum()) for end in (0, 50, 150)]
    for first, last in groups(vocabulary):
        dz = logp.logits_gradient(z[:, first:last].contiguous(), first, inv_t, mask, targets, state, -c)
        dh += fp32(dz, weight.value[first:last].T)
        for start, end in itertools.pairwise(units):
            dw[first:last] += fp32(dz[start:end].T, chosen[start:end].T)
    whole = torch.zeros_like(hidden)
    whole[rows] = dh.bfloat16()
    assert x.grad is not None and weight.grad is not None
    assert_bitwise(x.grad.cpu(), whole.cpu(), "dH: groups ascending")
    assert_bitwise(weight.grad.cpu(), dw.cpu(), "dW: units ascending")
    assert not bool(weight.grad[nobody].any()), "a column in nobody's set"

    column = torch.arange(vocabulary, device="cuda")
    inside = ((mask[:, column // 8].long() >> (column % 8)) & 1).bool()
    scaled = (chosen.double() @ weight.value.double().T / temperature).masked_fill(~inside, -torch.inf)
    exact = scaled.log_softmax(1)
    expected = exact.gather(1, targets[:, None])[:, 0]
    assert_close(found.detach().cpu(), expected.cpu(), rtol=0, atol=5e-5, why="fp32 chains")
    expected = -torch.where(inside, exact.exp() * exact, 0.0).sum(1)
    assert_close(entropy.cpu(), expected.cpu(), rtol=1e-5, atol=5e-5, why="fp32 chains")
    dz = (torch.nn.functional.one_hot(targets, vocabulary) - exact.exp()) * (c.double() / temperature)[:, None]
    for name, one, wanted in (
        ("dH", x.grad[rows], dz @ weight.value.double()),
        ("dW", weight.grad, dz.T @ chosen.double()),
    ):
        top = float(wanted.abs().max())
        assert_close(one.cpu(), wanted.cpu(), rtol=2e-2, atol=2e-3 * top, why=f"{name}: bf16 dz")

    free = logp.from_logits(z, targets, temperature, None)[0]
    assert int((free != found.detach()).sum()) > rows.numel() - 3, "the control: all columns"
    wider = mask.clone()
    wider[4, nobody // 8] |= 1 << nobody % 8
    assert (logp.from_logits(z, targets, temperature, wider)[1] != entropy).nonzero().flatten().tolist() == [4]
    wrong = targets.clone()
    wrong[2] = nobody
    with pytest.raises(ValueError, match="target of row 2 lies outside its retained set"):
        logp.score(hidden, weight, wrong, temperature, mask, layout, rows, head)


def test_a_target_outside_is_an_input_error() -> None:
    z = torch.zeros((2, 300), device="cuda")
    with pytest.raises(ValueError, match="outside the vocabulary of 300"):
        provider("selected_logp", "triton").from_logits(z, torch.tensor([0, 300], device="cuda"), 1.0, None)


def test_a_rank_without_a_loss_token_has_empty_gradients() -> None:
    """As context parallelism leaves one: nothing is launched, and no product is asked for an empty tensor."""
    from rl_engine.ops.selected_logp import LogpState

    weight = Weight("head", torch.randn((300, 64), device="cuda").bfloat16(), (Part("head", 0, 300),))
    logp, head = provider("selected_logp", "triton"), provider("lm_head", "triton")
    hidden, targets = torch.zeros((0, 64), dtype=torch.bfloat16, device="cuda"), torch.zeros(0, device="cuda").long()
    state, c = LogpState.empty(0, hidden.device), torch.zeros(0, device="cuda")
    dz = logp.group_gradient(hidden, weight, (0, 128), 1.0, None, targets, state, c, head)
    assert dz.shape == (0, 128) and dz.dtype == torch.bfloat16
