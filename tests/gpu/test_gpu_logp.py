"""Selected logp on a GPU: one result in every schedule, close to fp64, and wrong sums are caught."""

from __future__ import annotations

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


def test_a_target_outside_is_an_input_error() -> None:
    z = torch.zeros((2, 300), device="cuda")
    with pytest.raises(ValueError, match="outside the vocabulary of 300"):
        provider("selected_logp", "triton").from_logits(z, torch.tensor([0, 300], device="cuda"), 1.0, None)
