"""Every command line of the user guide: it plans, or is refused in one line that says why."""

from __future__ import annotations

import json
import os

import pytest

from rl_engine.config.paths import REPOSITORY
from rl_engine.config.topology import GUIDE_MATRIX
from rl_engine.entrypoints.parser import parse
from rl_engine.entrypoints.repro import main
from rl_engine.integrations.orchestrators.vime.experiments.rocm_attention import run_qwen3_8b

CUDA = REPOSITORY / "configs/integrations/orchestrators/vime/dense/qwen3-8b-tp4-cp2.json"
ROCM = REPOSITORY / "configs/integrations/orchestrators/vime/rocm_attention/mi300x-qwen3-8b.json"
DATA = "/data/rlk-repro"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("RLK_REPRO_") or name == "RAY_API_SERVER_ADDRESS"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return monkeypatch


@pytest.fixture
def cuda_host(machine):
    machine.setattr("rl_engine.config.host.gpu_kind", lambda: "cuda")
    machine.setenv("RLK_REPRO_WORKSPACE", DATA)
    machine.setenv("RLK_REPRO_MODEL_ROOT", "/models/Qwen3-8B")


@pytest.fixture
def rocm_host(machine):
    machine.setattr("rl_engine.config.host.gpu_kind", lambda: "rocm")
    machine.setenv("RLK_REPRO_PROFILE", str(ROCM))


def planned(capsys, argv: str) -> dict:
    assert main([*argv.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["plans"][0]["plan"]


CUDA_RUNS = [
    f"run --workspace {DATA} --mode native --rollouts 8 --wait",
    f"run --workspace {DATA} --mode consistency --rollouts 8 --wait",
    f"run --workspace {DATA} --mode consistency --rollouts 200 --wait",
    "run --tp 2 --rollout-tp 4 --temperature 0.7 --top-p 0.95 --steps 200",
    "run --ray-address http://host:8265 --rollouts 8",
    "run --allow-dirty --rollouts 1",
    "run --run-id second-try",
]


@pytest.mark.parametrize("line", CUDA_RUNS)
def test_cuda_runs_plan_and_say_that_the_stack_is_not_built(cuda_host, capsys, line):
    plan = planned(capsys, line.replace("run ", "run --dry-run ", 1))
    assert (plan["stack"], plan["backend"], plan["profile"]) == ("vime", "cuda", "qwen3-8b-tp4-cp2")
    assert plan["topology"]["rollout_engines"] == 2
    assert main(line.split()) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("rlk-repro: found --stack vime, expected")
    assert err[-1].endswith("one-gpu.json on a Hopper GPU, else cpu-smollm2.json beside it"), (
        "nobody asked for that stack"
    )
    assert len(err) == 2  # the profile line and the refusal


def test_a_gpu_of_another_kind_does_not_stand_in_the_way(machine, capsys, tmp_path):
    """Without a flag the CPU's demo, and one line that says why; asked for, the GPU is refused before a download."""
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\ncase $1 in -i) echo '40960, 8.0, NVIDIA A100';; *) echo '0, a, 1, 1, 1, 1';; esac\n")
    script.chmod(0o755)
    machine.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machine.setattr("rl_engine.config.host.gpu_kind", lambda: "cuda")
    machine.setattr("rl_engine.config.host.gpu_count", lambda: 1)
    plan = planned(capsys, "run --dry-run")
    assert (plan["profile"], plan["backend"]) == ("cpu-smollm2", "cpu")
    assert main(["plan"]) == 0
    assert "NVIDIA A100 has compute capability 8.0" in capsys.readouterr().out.splitlines()[0]
    for line in (["run", "--backend", "cuda"], ["verify", "--backend", "cuda"]):
        assert main(line) == 2
        said = capsys.readouterr().err.splitlines()
        assert said[-1].startswith("rlk-repro: found gpu kind: NVIDIA A100, compute capability 8.0, expected")
        assert len(said) == 2 and "this machine has a GPU" in said[0]
    assert not (tmp_path / ".rlk-workspace").exists()


def test_the_default_cuda_command_is_the_reference_experiment(cuda_host, capsys):
    plan = planned(capsys, f"plan --workspace {DATA} --mode consistency")
    assert plan["topology"] == {"train_tp": 4, "train_cp": 2, "rollout_tp": 4, "rollout_cp": 1, "rollout_engines": 2}
    assert (plan["max_tokens_per_gpu"], plan["global_batch_size"], plan["sampling"]["max_response_len"]) == (
        4096,
        8,
        7168,
    )
    assert (plan["engine"]["gpu_memory_utilization"], plan["evidence"], plan["rollouts"]) == (0.4, "formal", 200)
    assert plan["engine"]["graph_capture_sizes"] == [1, 2, 3, 4]
    assert plan["model"]["padded_vocab_size"] == 152576
    paths = dict(plan["paths"])
    assert paths["ref_load"] == f"{DATA}/checkpoints/Qwen3-8B_torch_dist"
    assert plan["run_dir"].startswith(f"{DATA}/data/runs/convergence/consistency-tp4cp2-")
    assert paths["prompt_data"] == f"{DATA}/data/datasets/dapo-math-17k.vime.jsonl"


def test_path_variables_and_flags_of_the_guide(cuda_host, machine, capsys):
    machine.setenv("RLK_REPRO_TE_ROOT", "/opt/transformer-engine/site-packages")
    machine.setenv("RLK_REPRO_CUDA_PYTHON_SITE", "/opt/cuda-python/site-packages")
    machine.setenv("RLK_REPRO_CUDA_RUNTIME_ROOT", "/opt/python/site-packages/nvidia/cuda_runtime")
    assert main(["plan", "--workspace", DATA, "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)["plans"][0]
    env = entry["environment"]
    assert env["PYTHONPATH"].startswith("/opt/transformer-engine/site-packages:/opt/cuda-python/site-packages:")
    assert env["CUDNN_FRONTEND_CUDART_LIB_NAME"] == "/opt/python/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12"
    flags = "--te-root /a --cuda-python-site /b --cuda-runtime-root /c"
    assert main(["plan", *flags.split(), "--json"]) == 0
    paths = dict(json.loads(capsys.readouterr().out)["plans"][0]["plan"]["paths"])
    assert (paths["te_root"], paths["cuda_python_site"], paths["cuda_runtime_root"]) == ("/a", "/b", "/c")


ROCM_RUNS = [
    ("run --tp 2 --rollout-tp 4 --temperature 0.7 --top-p 0.95 --steps 1", (2, 4, 4, 1, 2)),
    ("run --tp 8 --rollout-tp 4 --temperature 1.3 --top-p 0.8 --steps 1", (8, 1, 4, 1, 2)),
    ("plan --tp 4 --rollout-tp 2 --temperature 1 --top-p 1", (4, 2, 2, 1, 4)),
]


@pytest.mark.parametrize(("line", "shape"), ROCM_RUNS)
def test_rocm_commands(rocm_host, capsys, line, shape):
    plan = planned(capsys, line.replace("run ", "run --dry-run ", 1))
    assert tuple(plan["topology"].values()) == shape
    assert (plan["profile"], plan["backend"], plan["ray"]["port"], plan["ray"]["dashboard_port"]) == (
        "mi300x-qwen3-8b",
        "rocm",
        8090,
        48025,
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("verify", "verify on backend rocm"),
        ("run --detach", "--detach on backend rocm"),
        ("run --ray-address http://h:1", "--ray-address on backend rocm"),
        ("run --allow-dirty", "--allow-dirty on backend rocm"),
        ("run --pd", "--pd on backend rocm"),
        ("run --top-k 20", "--top-k 20 on rocm"),
        ("run --temperature 0", "--temperature 0"),
        ("run --top-p 0", "--top-p 0"),
        ("run --tp 3", "--tp 3"),
        ("run --tp 2 --cp 2", "8 ranks"),
        ("run --rollout-tp 4 --rollout-cp 4", "16 ranks per engine"),
    ],
)
def test_rocm_refusals(rocm_host, capsys, line, why):
    assert main(line.split()) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_rocm_placeholders_are_shown(rocm_host, capsys):
    assert main(["plan"]) == 0
    out = capsys.readouterr().out
    assert "edit me: --workspace or RLK_REPRO_WORKSPACE" in out
    assert "edit me: --model-root or RLK_REPRO_MODEL_ROOT" in out


def test_rocm_rollout_cp_is_marked_unvalidated(rocm_host, capsys):
    assert planned(capsys, "plan --rollout-cp 2")["evidence"] == "experimental"


def test_older_module_name_is_an_alias(rocm_host, machine, capsys):
    machine.delenv("RLK_REPRO_PROFILE")
    assert run_qwen3_8b.main(["--num-rollout", "1", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plans"][0]["plan"]
    assert (plan["profile"], plan["rollouts"]) == ("mi300x-qwen3-8b", 1)


@pytest.mark.parametrize(("train", "rollout"), GUIDE_MATRIX)
def test_every_pair_of_the_matrix_is_formal(cuda_host, capsys, train, rollout):
    line = f"plan --tp {train[0]} --rollout-tp {rollout[0]} --rollout-cp {rollout[1]} --temperature 0.7 --top-p 0.95"
    plan = planned(capsys, line)
    assert (plan["topology"]["train_cp"], plan["evidence"]) == (train[1], "formal")
    assert plan["topology"]["rollout_engines"] * rollout[0] * rollout[1] == 8
    share = 0.2 if train[0] == 1 and rollout[0] != 1 else 0.4
    assert plan["engine"]["gpu_memory_utilization"] == share


def test_all_topologies_of_the_full_matrix_plan(cuda_host, capsys):
    shapes = [(tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * cp <= 8]
    assert len(shapes) == 10
    for tp in (1, 2, 4, 8):
        for rollout_tp, rollout_cp in shapes:
            planned(capsys, f"plan --tp {tp} --rollout-tp {rollout_tp} --rollout-cp {rollout_cp}")


def test_prefill_decode_split(cuda_host, capsys):
    plan = planned(capsys, "plan --pd")
    assert (plan["engine"]["gpu_memory_utilization"], plan["evidence"]) == (0.25, "experimental")
    assert main(["plan", "--pd", "--tp", "2"]) == 2
    assert "TP4/CP2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        f"prepare --workspace {DATA} --download-data --convert-checkpoint",
        f"doctor --workspace {DATA}",
        f"doctor --workspace {DATA} --mode native",
        f"validate --run-dir {DATA}/data/runs/convergence/x --seal",
        "validate runs/x --rescore --expect-root abc",
        f"report --workspace {DATA}",
        "run --profile p.json --run-id NAME",
        "plan --ray-address http://host:8265",
        "run --num-rollout 3 --max-response-length 100",
    ],
)
def test_remaining_commands_parse(line):
    assert parse(line.split()).verb == line.split()[0]


def test_a_copied_profile_with_runner_args(cuda_host, capsys, tmp_path):
    body = json.loads(CUDA.read_text())
    body["runner_args"].append(["--save-interval", "50"])
    copied = tmp_path / "mine.json"
    copied.write_text(json.dumps(body))
    assert main(["plan", "--profile", str(copied), "--json"]) == 0
    command = json.loads(capsys.readouterr().out)["plans"][0]["command"]
    assert command[-2:] == ["--save-interval", "50"]
    body["runner_args"].append(["--num-rollout", "5"])
    copied.write_text(json.dumps(body))
    assert main(["plan", "--profile", str(copied)]) == 2
    assert "--rollouts also sets" in capsys.readouterr().err


def test_modes_that_pin_different_revisions_cannot_be_paired(cuda_host, capsys, tmp_path):
    body = json.loads(CUDA.read_text())
    body["repositories"]["vime"]["revisions"]["native"] = "0" * 40
    copied = tmp_path / "mine.json"
    copied.write_text(json.dumps(body))
    assert main(["plan", "--profile", str(copied), "--mode", "paired"]) == 2
    assert "one revision for both modes" in capsys.readouterr().err


def test_vime_needs_a_workspace(machine, capsys):
    assert main(["plan", "--profile", str(CUDA)]) == 2
    assert "--workspace" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "--workspace {ws}",
        "--workspace {ws} --mode consistency --lr 3e-6 --require-control --tp 3 --rollout-stop END",
        "--output-root {ws}/runs --steps 2",
    ],
)
def test_the_printed_command_makes_the_same_plan(machine, capsys, tmp_path, monkeypatch, line):
    """From anywhere: it names profile, workspace and everything that was given."""
    assert main(["plan", "--json", "--run-id", "x", *line.format(ws=tmp_path / "ws").split()]) == 0
    first = json.loads(capsys.readouterr().out)["plans"]
    command = first[0]["command"]
    assert command[1:4] == ["-m", "rl_engine.entrypoints.repro", "run"] and "--workspace" in " ".join(command)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["plan", "--json", *command[4:]]) == 0
    again = json.loads(capsys.readouterr().out)["plans"]
    assert [plan["digest"] for plan in again] == [plan["digest"] for plan in first]
