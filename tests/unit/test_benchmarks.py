"""Every benchmark runs from its command line to its JSON, on a model small enough to say nothing about speed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks.measure import SCHEMA, Case, Timing, in_turns

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"head_dim": 32, "vocab_size": 1500, "num_hidden_layers": 1}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, compute_threads: int) -> int:
    from benchmarks import workload

    monkeypatch.setattr(workload, "DEMO_SHAPE", {**workload.DEMO_SHAPE, **SMALL})
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    return compute_threads


@pytest.mark.parametrize(
    ("name", "contestants"),
    [
        ("ops", {"native", "consistency"}),
        ("train", {"native", "consistency"}),
        ("rollout", {"native", "consistency", "transformers"}),
    ],
)
def test_benchmark_writes_its_json(small: int, tmp_path: Path, name: str, contestants: set[str]) -> None:
    out = tmp_path / "results" / "out.json"
    assert bench.main([name, "--rounds", "1", "--layers", "1", "--threads", str(small), "--out", str(out)]) == 0
    body = json.loads(out.read_text())
    assert (body["schema"], body["benchmark"], body["about"]["threads"]) == (SCHEMA, name, small)
    assert len(body["cases"]) >= 5
    for case in body["cases"]:
        assert set(case["times"]) == contestants
        assert all(times["median"] > 0 and len(times["seconds"]) == 1 for times in case["times"].values())
        assert all(case["speed"][other] > 0 for other in contestants - {"native"})


def test_contestants_take_turns() -> None:
    order: list[str] = []
    timings = in_turns({"native": lambda: order.append("a"), "other": lambda: order.append("b")}, 3)
    assert order == list("ab" + "ababab")
    assert all(len(timing.seconds) == 3 for timing in timings.values())


def test_speed_is_relative_to_native() -> None:
    case = Case("x", 100, "tokens", {"native": Timing([4.0, 2.0, 2.0]), "consistency": Timing([1.0, 1.0, 9.0])})
    assert case.speed("consistency") == 2.0
    assert case.record()["times"]["consistency"]["per_second"] == 100.0


def test_e2e_reads_the_records_of_both_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import e2e

    runs = []
    for mode, rollout in (("native", 4.0), ("consistency", 2.0)):
        folder = tmp_path / mode
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps({"plan": {"mode": mode}}))
        seconds = {**dict.fromkeys(e2e.PHASES, 0.0), "rollout": rollout, "train": 1.0}
        (folder / "steps.jsonl").write_text((json.dumps({"seconds": seconds}) + "\n") * 2)
        runs.append({"run_dir": str(folder)})
    done = subprocess.CompletedProcess([], 0, stdout=json.dumps({"runs": runs}))
    monkeypatch.setattr(e2e.subprocess, "run", lambda *args, **options: done)
    report = e2e.main(bench.parser().parse_args(["e2e", "--rounds", "2", "--threads", "1"]))
    assert {case.name: round(case.speed("consistency"), 2) for case in report.cases} == {
        "step": 1.67,
        "rollout": 2.0,
        "train": 1.0,
    }


def test_gpu_figures_in_the_docs_are_the_stored_ones() -> None:
    """Fails when results or measured code changed; ``python -m benchmarks.gpu.pages`` writes the page anew and marks
    figures of earlier code as stale."""
    from benchmarks.gpu.pages import PAGE, rendered

    assert PAGE.read_text() == rendered(PAGE.read_text()), "run python -m benchmarks.gpu.pages"


def test_gpu_figures_of_earlier_code_are_called_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import Result, Row, pages

    result = Result("gemm", "a" * 64, dict.fromkeys(("name", "driver", "torch", "triton"), "x"))
    result.rows = [Row("product", 0.5, 0.6, 0.9, "cuBLAS"), Row("memory", 0.04, 0.05, 0.035, "logits", at_most=True)]
    monkeypatch.setattr(pages, "stored", lambda family: json.loads(result.json()))
    assert "Stale" not in pages.table("gemm", lambda family: "a" * 64)
    moved = pages.table("gemm", lambda family: "b" * 64)
    assert "**Stale**" in moved and "| product | 0.500 (missed) | 0.6 | 0.9 | cuBLAS |" in moved
    assert [row.verdict() for row in result.rows] == ["missed", "must"]


def test_gpu_figures_by_hand_stay_until_a_result_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import Proof, Result, Row, pages

    marks = {name: pages.PAGE.read_text().count(f"<!-- gpu results: {name} -->") for name in pages.FAMILIES}
    assert set(marks.values()) == {1}, "every family has its place on the page"
    page = "a\n<!-- gpu results: rows -->\n\nby hand\n\n<!-- end -->\nz\n"
    found: dict[str, Result] = {}
    monkeypatch.setattr(pages, "stored", lambda family: json.loads(found[family].json()) if found else None)
    assert pages.rendered(page, lambda family: "a" * 64) == page
    found["rows"] = Result("rows", "a" * 64, dict.fromkeys(("name", "driver", "torch", "triton"), "x"))
    found["rows"].rows.append(Row("norm forward", 0.9, 0.85, 0.95, "bytes"))
    found["rows"].ended = "out of time"
    found["rows"].proofs += [Proof("split-K", 8, 3, True), Proof("tf32", 8, 0, True), Proof("dx", 8, 1)]
    made = pages.rendered(page, lambda family: "a" * 64)
    assert "by hand" not in made and "| norm forward | 0.900 | 0.85 | 0.95 | bytes |" in made
    assert "1 of 3 proofs held over 24 outputs; caught controls: split-K.\n\n**Failed**: tf32, dx.\n" in made
    assert "The run ended early (out of time)" in made and made.startswith("a\n") and made.endswith("<!-- end -->\nz\n")


# family -> (code that decides its figures and proofs, code that does not), from the checkout's root
SOURCES = {
    "gemm": (
        "ops/triton_gemm.py ops/gluon_fold.py ops/cublaslt.py ops/gemm_table.py ops/linear/cublaslt.py "
        "ops/lm_head/cublaslt.py ops/weight.py qualify/gpu/products.py qualify/gpu/controls.py qualify/gpu/run.py",
        "ops/attention/triton.py ops/selected_logp/triton.py ops/rms_norm/triton.py qualify/gpu/prices.py "
        "qualify/gpu/logp.py qualify/gpu_attention.py qualify/gpu_rows.py ops/linear/cpu.py",
    ),
    "logp": (
        "ops/selected_logp/triton.py ops/triton_gemm.py ops/gemm_table.py ops/lm_head/cublaslt.py ops/weight.py "
        "ops/linear/cublaslt.py qualify/gpu/logp.py qualify/gpu/logp_controls.py qualify/gpu/products.py",
        "ops/attention/triton.py ops/rms_norm/triton.py qualify/gpu/prices.py qualify/gpu_attention.py",
    ),
    "attention": (
        "ops/attention/triton.py ops/attention/hopper_forward.py ops/attention/hopper_backward.py "
        "ops/attention/hopper_decode.py ops/attention/triton_decode.py ops/layout.py ops/triton_functions.py "
        "numerics/contract.py qualify/gpu_attention.py",
        "ops/triton_gemm.py ops/selected_logp/triton.py ops/rms_norm/triton.py qualify/gpu/products.py "
        "qualify/gpu/prices.py qualify/gpu/run.py qualify/gpu_rows.py ops/attention/stock.py",
    ),
    "rows": (
        "ops/rms_norm/triton.py ops/rms_norm/reference.py ops/rope/triton.py ops/swiglu/triton.py ops/adamw/triton.py "
        "ops/sample/triton.py ops/embedding/reference.py ops/grad_norm/triton.py qualify/gpu_rows.py",
        "ops/triton_gemm.py ops/selected_logp/triton.py ops/attention/triton.py qualify/gpu/products.py "
        "qualify/gpu/prices.py qualify/gpu/run.py qualify/gpu_attention.py ops/rms_norm/stock.py",
    ),
}


@pytest.mark.parametrize("family", SOURCES)
def test_gpu_figures_depend_on_the_code_that_decides_them_and_on_no_other(family: str) -> None:
    from benchmarks.gpu import FAMILIES, ROOT
    from benchmarks.gpu.sources import ENDS, sources

    assert set(FAMILIES) == set(SOURCES)
    found = {str(file.relative_to(ROOT)) for file in sources(ROOT / "benchmarks" / "gpu" / f"{family}.py")}
    inside, outside = ({f"rl_engine/{name}" for name in names.split()} for names in SOURCES[family])
    assert all((ROOT / name).is_file() for name in inside | outside)
    inside |= {f"benchmarks/gpu/{family}.py", "benchmarks/gpu/device.py", "rl_engine/qualify/cases.py"}
    inside |= {f"rl_engine/qualify/gpu/{name}.py" for name in ("data", "parts", "timing")}
    assert inside <= found and not outside & found
    assert not found & {f"benchmarks/gpu/{name}.py" for name in FAMILIES if name != family}
    assert not any(name.replace("/", ".").removesuffix(".py").removesuffix(".__init__") in ENDS for name in found)


def test_gpu_sources_are_found_in_functions_by_name_and_behind_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu import sources

    registry = "REGISTRY: dict = {'norm': {'a': ('norm.a', 'A'), 'b': ('norm.b', 'B')}, 'rms_norm': {}}\nimport other\n"
    texts = {
        "benchmarks/gpu/family.py": (
            "import torch\nfrom rl_engine.ops import first\nPROVERS = ('rl_engine.prover', 'rl_engine.nothing')\n"
            "def f():\n    from rl_engine.lazy import value\n    return provider('norm', 'a')\n"
        ),
        "rl_engine/ops/first.py": "import rl_engine.second\nNOT_FOLLOWED = 'rl_engine.other'\n",
        "rl_engine/numerics/providers.py": registry,
        "rl_engine/ops/operators.py": "from rl_engine.numerics.providers import REGISTRY\nimport other\n",
        "rl_engine/second.py": "import rl_engine.ops.first\nfrom rl_engine.ops.operators import provider\n",
        "rl_engine/prover.py": "def g(name):\n    assert name in ('b', 'c')\n    return provider('norm', name)\n",
        **{f"rl_engine/{name}.py": "" for name in ("lazy", "other", "ops/norm/a", "ops/norm/b", "models/config")},
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    sources._registry.cache_clear()
    try:
        family = tmp_path / "benchmarks/gpu/family.py"
        found = {str(file.relative_to(tmp_path)) for file in sources.sources(family)}
        first = sources.digest(sources.sources(family))
        (tmp_path / "rl_engine/other.py").write_text("x = 1\n")
        assert sources.digest(sources.sources(family)) == first
        (tmp_path / "rl_engine/lazy.py").write_text("value = 1\n")
        assert sources.digest(sources.sources(family)) != first
    finally:
        sources._registry.cache_clear()
    unread = ("other", "ops/operators", "numerics/providers", "models/config")
    assert found == set(texts) - {f"rl_engine/{name}.py" for name in unread}


FAMILY = """
import os, signal
from benchmarks.gpu import Proof, Row
def prove(device):
    yield Proof("chain", 8, 0)
def measure(device):
    yield Row("first", 1.0, None, None, "native")
    END
    device.check()
    yield Row("second", 1.0, None, None, "native")
"""


@pytest.mark.parametrize(
    ("end", "code", "ended", "rows"),
    [
        ("pass", 0, "complete", 2),
        ("os.kill(os.getpid(), signal.SIGTERM)", 1, "out of time", 1),
        ("raise ValueError('broken')", 1, "ValueError: broken", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "interrupted", 1),
    ],
    ids=["whole", "terminated", "broken", "killed"],
)
def test_an_interrupted_gpu_benchmark_has_written_what_it_did(
    tmp_path: Path, end: str, code: int, ended: str, rows: int
) -> None:
    (tmp_path / "family.py").write_text(FAMILY.replace("END", end))
    command = (
        "import sys, torch\nfrom benchmarks.gpu import FAMILIES\nfrom benchmarks.gpu.device import Device\n"
        "torch.cuda.is_available, Device.about, torch.cuda.empty_cache = lambda: True, lambda self: {}, lambda: None\n"
        "FAMILIES |= {'gemm': 'family', 'rows': 'family'}\nfrom benchmarks.gpu.run import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", command, "--family", "gemm", "--family", "rows", "--out", str(tmp_path)]
    path = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    done = subprocess.run(words, env={**os.environ, **path}, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    body = json.loads((tmp_path / "gpu-gemm.json").read_text())
    assert (body["ended"], len(body["rows"]), body["proofs"]["held"]) == (ended, rows, 1)
    begun = ended not in ("out of time", "interrupted")
    assert (tmp_path / "gpu-rows.json").is_file() == begun
    assert ("rows: not begun, out of time" in done.stdout) == (ended == "out of time")


def test_rollout_on_a_gpu_takes_turns_and_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU in the place of the GPU: the same turns, passes and report."""
    import torch

    from benchmarks import gpu_rollout
    from rl_engine.engines.rollout.builtin.engine import RolloutEngine, RolloutSettings
    from rl_engine.ops import Operators, uniform
    from tests.engines.rollout.schedules import providers, small_weights
    from tests.helpers.graphs import RememberedGraphs

    def engine(name: str, weights: object, provider: str, batch: int, options: argparse.Namespace) -> RolloutEngine:
        device = RememberedGraphs()
        ops = providers("graphs") if name == "graphs" else Operators(uniform("stock" if name == "native" else "cpu"))
        settings = RolloutSettings(max_batch=batch, graph_sizes=(1, 2) if name == "graphs" else ())
        made = RolloutEngine(small_weights().clone(), ops, 300, settings, name, graph_device=device)
        device.engine = made
        return made

    for name, value in (("is_available", True), ("synchronize", None), ("get_device_name", "a device")):
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(gpu_rollout, "_weights", lambda config, device: None)
    monkeypatch.setattr(gpu_rollout, "_products", lambda: "cpu")
    monkeypatch.setattr(gpu_rollout, "_engine", engine)
    monkeypatch.setattr(gpu_rollout, "QWEN3_8B", {**gpu_rollout.QWEN3_8B, "vocab_size": 1501})
    out = tmp_path / "out.json"
    words = ["gpu-rollout", "--batch", "2", "--prompt", "64", "--new", "8", "--rounds", "2", "--out", str(out)]
    assert bench.main(words) == 0
    body = json.loads(out.read_text())
    assert [case["case"] for case in body["cases"]] == [
        "decode, 2 samples of 64 to 72 tokens",
        "ragged, 4 samples, 2 at once",
    ]
    assert body["cases"][0]["work"] == 2 * 7 and body["about"]["graphs of 2"] > 1
    for case in body["cases"]:
        assert set(case["times"]) == {"native", "launched", "graphs"}
        assert all(len(times["seconds"]) == 2 and times["median"] > 0 for times in case["times"].values())


@pytest.mark.parametrize("verb", ["gpu", "gpu-rollout"])
def test_gpu_benchmark_without_a_gpu_says_so(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert bench.main([verb]) == 2
    assert "found no GPU" in capsys.readouterr().err
