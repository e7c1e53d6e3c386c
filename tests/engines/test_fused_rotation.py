"""QK norm and rotation as one operator: the model's bits are those of the two, and evidence and locate know both."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from rl_engine.engines.evidence import route_records
from rl_engine.engines.locate import Watch, first_difference
from rl_engine.engines.rollout.builtin.engine import RolloutEngine, RolloutSettings
from rl_engine.engines.types import Sample
from rl_engine.models.weights import ModelWeights, random_weights
from rl_engine.ops import Operators, uniform
from tests.helpers.fused import FusedCpuRope, UnroundedRope, fused_operators
from tests.helpers.models import (
    copy_weights,
    differing,
    joined,
    llama,
    prompts,
    qwen3,
    requests,
    rollout_engine,
    rollout_logprobs,
    sampling,
    train_engine,
)
from tests.helpers.numeric import assert_bitwise

SAMPLING = sampling(max_response_len=6, stop_tokens=tuple(range(3, 120)))
ADVANTAGES = [1.0, -1.0, 0.5, -2.0, 1.5, -0.5]
SEPARATE = {"qk_norm", "rope"}


@pytest.fixture(scope="module")
def weights() -> ModelWeights:
    """Gains that are no powers of two: with ones, a rounding left out would hardly show."""
    made = random_weights(qwen3(layers=2, intermediate=384), 1)
    for weight in made:
        if weight.name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.value.copy_(torch.linspace(0.7, 1.3, weight.shape[0]).bfloat16())
    return made


@pytest.fixture(scope="module")
def samples(weights: ModelWeights, compute_threads: int) -> list[Sample]:
    """What the separate operators drew."""
    asked = requests(prompts(weights.config.vocabulary, (5, 97, 1)), 2)
    return rollout_engine(weights).generate(asked, 0, SAMPLING)


def update(weights: ModelWeights, ops: Operators, samples: list[Sample], **settings: Any) -> dict[str, Any]:
    """Scores, then every gradient and weight of one update."""
    engine = train_engine(weights, ops, **settings)
    scores = engine.score(samples)
    result = engine.step(samples, ADVANTAGES, scores)
    assert result.ratio_mismatches == 0
    found: dict[str, Any] = {"logprobs": joined(scores), "norm": np.float64(result.grad_norm)}
    found |= {f"gradient of {name}": values.clone() for name, values in engine.gradients().items()}
    return found | {f"weight of {name}": rows for name, (_, rows) in engine.weights.export_rows().items()}


def operators_of(ops: Operators) -> set[str]:
    return {route.operator for route in ops.routes()}


@pytest.mark.parametrize("recompute", [False, True])
def test_an_update_has_the_separate_operators_bits(
    weights: ModelWeights, samples: list[Sample], recompute: bool
) -> None:
    fused, separate = fused_operators(), Operators(uniform("cpu"))
    settings = {"recompute": recompute, "fold_tokens": 64}
    expected = update(weights, separate, samples, **settings)
    found = update(weights, fused, samples, **settings)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert_bitwise(found[name], values, name)
    gains = [values for name, values in expected.items() if name.startswith("gradient") and "_norm.weight" in name]
    assert len(gains) == 4 and all(bool(values.count_nonzero()) for values in gains)
    assert "qk_norm_rope" in operators_of(fused) and not SEPARATE & operators_of(fused)
    assert operators_of(separate) >= SEPARATE and "qk_norm_rope" not in operators_of(separate)
    control = update(weights, fused_operators(UnroundedRope), samples, **settings)
    assert differing(control["logprobs"], expected["logprobs"]) > 0.5 * expected["logprobs"].size
    for name, values in expected.items():
        if name.startswith("gradient"):
            assert not torch.equal(control[name], values), f"the control's {name} agreed by chance"


@pytest.mark.parametrize("settings", [{}, {"chunk": 16, "max_batch": 2}], ids=str)
def test_rollout_has_the_separate_operators_bits(
    weights: ModelWeights, samples: list[Sample], settings: dict[str, int]
) -> None:
    asked = requests(prompts(weights.config.vocabulary, (5, 97, 1)), 2)
    engine = RolloutEngine(copy_weights(weights), fused_operators(), 256, RolloutSettings(**settings))
    drawn = engine.generate(asked, 0, SAMPLING)
    for found, expected in zip(drawn, samples, strict=True):
        assert_bitwise(found.response_tokens, expected.response_tokens, "tokens")
        assert_bitwise(found.logprobs, expected.logprobs, "logprobs")
    assert "qk_norm_rope" in operators_of(engine.ops) and not SEPARATE & operators_of(engine.ops)
    scores = joined(train_engine(weights, fused_operators()).score(drawn))
    assert_bitwise(scores, rollout_logprobs(drawn), "the trainer's logprobs")


def test_evidence_names_the_fused_operator_and_its_provider(weights: ModelWeights, samples: list[Sample]) -> None:
    """One call a layer and pass, by the provider of both operators."""
    ops = fused_operators()
    train_engine(weights, ops).score(samples[:1])
    (record,) = (r for r in route_records(ops.routes(), "train") if r.operator == "qk_norm_rope")
    assert (record.provider, record.dtype, record.execution, record.calls) == ("cpu", "bfloat16", "eager", 2)


def test_what_cannot_be_one_call_stays_two(weights: ModelWeights, samples: list[Sample]) -> None:
    """Another provider of the norm; a model without QK norm; the plain operators."""
    native = fused_operators()
    native._providers["qk_norm"] = Operators(uniform("reference")).provider("qk_norm")
    train_engine(weights, native).score(samples[:1])
    assert operators_of(native) >= SEPARATE and "qk_norm_rope" not in operators_of(native)
    plain, ops = random_weights(llama(layers=1, intermediate=384), 1), fused_operators()
    train_engine(plain, ops).score(samples[:1])
    assert "rope" in operators_of(ops) and not {"qk_norm", "qk_norm_rope"} & operators_of(ops)
    assert not Operators(uniform("stock")).fuses_qk_norm(64)


def watched(weights: ModelWeights, ops: Operators, sample: Sample) -> Watch:
    """Every operator's rows of one sample that is scored."""
    engine = train_engine(weights, ops)
    watch = Watch(engine.ops, sample.length)
    watch.begin([(row, row) for row in range(sample.length - 1)])
    engine.score([sample])
    watch.end()
    return watch


def test_locate_compares_operator_by_operator(weights: ModelWeights, samples: list[Sample]) -> None:
    """A side that fuses has the places of one that does not, and what its fused operator gave in them."""

    class Late(FusedCpuRope):
        """Wrong in one bit of the last head of k, from the second layer on."""

        calls = 0

        def norm_rotate(self, *arguments: Any) -> Any:
            q, k = super().norm_rotate(*arguments)
            self.calls += 1
            if self.calls > 1:
                k.view(torch.int16)[3, -1, 5] ^= 1
            return q, k

    sample = dataclasses.replace(samples[2], prompt_tokens=samples[2].prompt_tokens[:9])
    separate = watched(weights, Operators(uniform("cpu")), sample)
    fused = watched(weights, fused_operators(), sample)
    assert [place.operator for place in fused.places] == [place.operator for place in separate.places]
    assert [(place.layer, place.weight) for place in fused.places] == [
        (place.layer, place.weight) for place in separate.places
    ]
    assert first_difference(fused, separate) is None
    width = weights.config.head_dim
    found = first_difference(watched(weights, fused_operators(Late), sample), separate)
    assert found is not None
    assert (found["layer"], found["operator"], found["position"]) == (1, "rope", 3)
    assert (found["element"], found["elements"]) == ((weights.config.kv_heads - 1) * width + 5, 1)
    unrounded = first_difference(watched(weights, fused_operators(UnroundedRope), sample), separate)
    assert unrounded is not None and (unrounded["layer"], unrounded["operator"]) == (0, "rope")
