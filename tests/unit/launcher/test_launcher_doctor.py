"""doctor on a healthy machine and on broken ones."""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl_engine.checks import doctor, doctor_inputs, doctor_machine, doctor_software
from rl_engine.checks.doctor_ask import Answer, ask, version_at_least, version_matches
from rl_engine.config import host
from rl_engine.config.child import run_child
from rl_engine.config.memory import rollout_memory, train_memory
from rl_engine.config.paths import REPOSITORY
from rl_engine.entrypoints.parser import parse
from rl_engine.entrypoints.repro import _resolve, main
from tests.helpers.checkpoints import write_config, write_model

ONE_GPU = REPOSITORY / "configs/demo/one-gpu.json"
CUDA = REPOSITORY / "configs/integrations/orchestrators/vime/dense/qwen3-8b-tp4-cp2.json"


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("RLK_REPRO_") or name == "RAY_API_SERVER_ADDRESS"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    doctor_software._versions.cache_clear()


def resolved(*argv: str):
    return _resolve(parse(["doctor", "--mode", "consistency", *argv]))[0]


def cuda(*argv: str, **changes):
    item = resolved("--profile", str(CUDA), "--workspace", "w", *argv)
    if changes:
        requirements = item.profile.profile.requirements.model_copy(update=changes)
        profile = item.profile.profile.model_copy(update={"requirements": requirements})
        item = dataclasses.replace(item, profile=dataclasses.replace(item.profile, profile=profile))
    return item


def script(folder: Path, name: str, body: str) -> str:
    file = folder / name
    file.write_text("#!/bin/sh\n" + body + "\n")
    file.chmod(0o755)
    return str(file)


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_versions_are_compared_by_the_parts_given():
    assert version_matches("2.18.3+cu128", "2.18")
    assert version_matches("2.9.1", "2.9.1")
    assert not version_matches("2.1.8", "2.18")
    assert not version_matches("2.9", "2.9.1")
    assert version_at_least("2.13.0+cpu", "2.9")
    assert not version_at_least("2.8.9", "2.9")
    assert version_at_least("2.9.0rc1", "2.9")


def test_a_healthy_machine(capsys):
    code = main(["doctor", "--json"])
    body = json.loads(capsys.readouterr().out)
    found = by_name(doctor.Finding(**finding) for finding in body["findings"])
    assert (code, body["failed"]) == (0, 0), [finding for finding in body["findings"] if finding["status"] == "FAIL"]
    for name in ("interpreter", "version torch", "torch", "ray", "gpus", "disk", "threads", "model", "prompts"):
        assert found[name].status == "PASS"
    assert {path["name"] for path in body["paths"]} >= {"workspace", "model_root", "python"}


def test_text_has_sources_findings_and_hints(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (doctor_inputs.paths,))
    monkeypatch.setattr(doctor.examine, "__defaults__", (doctor.CHECKS,))
    assert main(["doctor", "--model-root", "/does/not/exist"]) == 1
    out = capsys.readouterr().out
    assert "[flag: --model-root]" in out
    assert "[FAIL] path model_root: found /does/not/exist is missing, expected a readable path" in out
    assert "hint: --model-root PATH or RLK_REPRO_MODEL_ROOT" in out
    assert "1 failed" in out


def test_plan_check_adds_doctor(capsys, monkeypatch):
    monkeypatch.setattr(doctor.examine, "__defaults__", ((doctor_machine.threads,),))
    assert main(["plan", "--check"]) == 0
    out = capsys.readouterr().out
    assert "plan consistency" in out
    assert "[PASS] threads" in out


def test_a_crashing_check_is_a_finding():
    def broken(item):
        raise RuntimeError("two\nlines")

    (finding,) = doctor.examine(resolved(), [broken])
    assert (finding.status, finding.name) == ("FAIL", "broken")
    assert "RuntimeError: two lines" in finding.found


def test_children_that_hang_die_or_chatter(tmp_path):
    started = time.monotonic()
    assert "no answer within 0.2 s" in run_child(["sh", "-c", "sleep 30 & wait"], 0.2)[1]
    assert time.monotonic() - started < 10
    assert "signal 11" in run_child(["sh", "-c", "kill -SEGV $$"], 10)[1]
    assert "No such file" in run_child([str(tmp_path / "none")], 10)[1]
    assert ask(sys.executable, "print('noise'); print('[1]')", 20).error
    assert ask(sys.executable, "print('noise')", 20).error
    assert ask(sys.executable, "print('noise'); print('{\"a\": 1}')", 20).text("a") == "1"


def test_an_interpreter_without_torch(tmp_path):
    bare = script(tmp_path, "python", f'exec "{sys.executable}" -S -E "$@"')
    found = by_name(doctor.examine(resolved("--python", bare), doctor.CHECKS[1:5]))
    assert found["interpreter"].status == "PASS"
    assert (found["version torch"].status, found["version torch"].found) == ("FAIL", "none")
    assert (found["torch"].status, found["ray"].status) == ("FAIL", "FAIL")
    assert "No module named 'torch'" in found["torch"].found


def test_a_wrong_missing_or_hanging_interpreter(tmp_path, monkeypatch):
    (finding,) = doctor_software.interpreter(cuda(python="3.9"))
    assert (finding.status, finding.expected) == ("FAIL", "Python 3.9")
    old = script(tmp_path, "old", """echo '{"python": "3.10.4"}'""")
    (finding,) = doctor_software.interpreter(resolved("--python", old))
    assert (finding.status, finding.found) == ("FAIL", "Python 3.10.4")
    (finding,) = doctor_software.interpreter(resolved("--python", str(tmp_path / "none")))
    assert finding.status == "FAIL"
    monkeypatch.setattr(doctor_software, "ASK_SECONDS", 0.2)
    monkeypatch.setattr("rl_engine.config.paths.SITE_SECONDS", 0.2)
    (finding,) = doctor_software.interpreter(resolved("--python", script(tmp_path, "slow", "sleep 30")))
    assert (finding.status, "no answer" in finding.found) == ("FAIL", True)


def test_pins_of_the_reference_profile(tmp_path):
    body = {
        "python": "3.11.15",
        "torch": "2.9.1+cu128",
        "ray": "2.57.1",
        "vllm": "0.16.0",
        "transformer_engine": "2.18.0",
    }
    python = script(tmp_path, "python", f"echo '{json.dumps(body)}'")
    found = by_name(doctor_software.versions(cuda("--python", python)))
    good = {name for name, finding in found.items() if finding.status == "PASS"}
    assert good >= {"version torch", "version vllm", "version transformer_engine"}
    assert (found["version ray"].status, found["version ray"].expected) == ("FAIL", "2.57.0")


@pytest.fixture
def dashboard():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            version = {"version": "4", "ray_version": "2.57.0", "ray_commit": "x", "session_name": "s"}
            nodes = {"data": {"summary": [{"raylet": {"resourcesTotal": {"GPU": 8.0, "object_store_memory": 2e11}}}]}}
            body = json.dumps(version if self.path.startswith("/api/version") else nodes).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_ray_cluster_that_answers_or_has_another_version(dashboard, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    found = by_name(doctor_software.ray_works(cuda("--ray-address", dashboard)))
    assert (found["ray"].status, found["ray gpus"].status, found["ray object store"].status) == ("PASS",) * 3
    answer = Answer({"version": "2.56.0", "gpus": 4})
    monkeypatch.setattr(doctor_software, "ask", lambda *arguments: answer)
    found = by_name(doctor_software.ray_works(cuda("--ray-address", dashboard)))
    assert (found["ray"].status, found["ray gpus"].status) == ("FAIL", "FAIL")


def test_ray_that_cannot_be_reached(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        (finding,) = doctor_software.ray_works(cuda("--ray-address", address))
    assert finding.status == "FAIL"
    assert address in finding.found
    assert "--ray-address" in finding.hint


def test_a_port_that_somebody_uses(monkeypatch):
    monkeypatch.setattr(doctor_software, "ask", lambda *arguments: Answer({"version": "2.60.0"}))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = by_name(doctor_software.ray_works(resolved("--ray-port", str(port))))
    assert found[f"port {port}"].status == "FAIL"
    assert "left alone" in found[f"port {port}"].hint


def smi(tmp_path, monkeypatch, rows: list[str]) -> None:
    script(tmp_path, "nvidia-smi", "cat <<'EOF'\n" + "\n".join(rows) + "\nEOF")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def card(index: int, name: str = "NVIDIA H100 80GB HBM3", used: int = 4, busy: str = "0") -> str:
    return f"{index}, {name}, 81559, {used}, {busy}, 570.86.10"


def test_gpus_through_a_fake_nvidia_smi(tmp_path, monkeypatch):
    smi(tmp_path, monkeypatch, [card(i) for i in range(8)])
    found = by_name(doctor_machine.gpus(cuda()))
    assert {finding.status for finding in found.values()} == {"PASS"}
    assert "570.86.10" in found["gpu driver"].found
    smi(tmp_path, monkeypatch, [card(0, used=40000), card(1, busy="97"), card(2, name="NVIDIA A100-SXM4-80GB")])
    found = by_name(doctor_machine.gpus(cuda()))
    assert (found["gpus"].status, found["gpus"].found) == ("FAIL", "3")
    assert (found["gpu model"].status, found["gpu model"].found) == ("FAIL", "NVIDIA A100-SXM4-80GB")
    assert (found["gpus idle"].status, found["gpus idle"].found) == ("FAIL", "GPUs 0, 1 in use")
    script(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    (finding,) = doctor_machine.gpus(cuda())
    assert (finding.status, finding.found) == ("FAIL", "NVIDIA-SMI has failed")


def test_memory_of_the_gpu_that_both_engines_share(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert list(doctor_machine.shared_gpu(resolved())) == []

    def judged(answer: str) -> list[tuple[str, str, str]]:
        script(tmp_path, "nvidia-smi", answer)
        return [(f.name, f.status, f.found) for f in doctor_machine.shared_gpu(resolved("--backend", "cuda"))]

    for cells, kind, memory in (
        ("81559, 9.0, NVIDIA H100", "PASS", "PASS"),
        ("900, 9.0, NVIDIA H100 MIG", "PASS", "FAIL"),
        ("[N/A], 9.0, NVIDIA H100", "PASS", "FAIL"),
        ("81559, 8.0, NVIDIA A100", "FAIL", "PASS"),
        ("81559", "FAIL", "PASS"),
    ):
        found = judged(f'test "$2" = 3 && echo "{cells}"')
        assert [(name, status) for name, status, _ in found] == [("gpu kind", kind), ("gpu memory", memory)], cells
    assert {(status, found) for _, status, found in judged("echo 'NVIDIA-SMI has failed' >&2; exit 9")} == {
        ("FAIL", "NVIDIA-SMI has failed")
    }


def test_which_gpu_is_refused_by_default(tmp_path, monkeypatch):
    """Each as ``run --backend cuda`` would refuse it; the demo fits where the default says that it does."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(host, "gpu_count", lambda: 1)
    for cells, words in (
        ("81559, 9.0, NVIDIA H100", ""),
        ("81559, 8.0, NVIDIA A100", "NVIDIA A100 has compute capability 8.0, the GPU operators are proven on 9.0"),
        ("4096, 9.0, NVIDIA H100 MIG", "has 4.0 GiB, the GPU's demo takes 8"),
        ("[N/A], 9.0, NVIDIA H100", "has 0.0 GiB"),
    ):
        script(tmp_path, "nvidia-smi", f'echo "{cells}"')
        found = host.refused_gpu("cuda")
        assert words in found and bool(found) == bool(words), cells
        judged = [f.status for f in doctor_machine.shared_gpu(resolved("--backend", "cuda", "--profile", str(ONE_GPU)))]
        assert ("FAIL" in judged) == bool(words), cells
    script(tmp_path, "nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    assert "NVIDIA-SMI has failed" in host.refused_gpu("cuda")
    monkeypatch.setattr(host, "gpu_count", lambda: 0)
    assert host.refused_gpu("cuda") == "CUDA_VISIBLE_DEVICES leaves no GPU"
    assert "AMD" in host.refused_gpu("rocm") and host.refused_gpu(None) == ""


def test_the_demo_takes_what_the_default_asks_of_a_gpu():
    arms = _resolve(parse(["plan", "--profile", str(ONE_GPU), "--backend", "cuda"]))
    needs = max(train_memory(arm.plan).total + rollout_memory(arm.plan, None).total for arm in arms)
    needs += 2 * doctor_machine.CONTEXT_BYTES
    assert 0.8 * host.DEMO_BYTES < needs <= host.DEMO_BYTES


def test_hidden_gpus_do_not_count(monkeypatch):
    monkeypatch.setattr(host.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    for visible, count in (("", 0), ("-1", 0), ("0", 1), ("1,-1,0", 1), ("0,1,2", 2), ("GPU-1f", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert host.gpu_count() == count, visible
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert host.gpu_count() == 2


def test_amd_gpus_other_than_gfx942_are_a_warning(tmp_path, monkeypatch):
    profile = REPOSITORY / "configs/integrations/orchestrators/vime/rocm_attention/mi300x-qwen3-8b.json"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, status in (("gfx942", "PASS"), ("gfx950", "WARN")):
        script(tmp_path, "rocminfo", "\n".join(f"echo '  Name:   {name}'" for _ in range(8)))
        found = by_name(doctor_machine.gpus(resolved("--profile", str(profile))))
        assert (found["gpus"].status, found["gpu model"].status) == ("PASS", status)


def test_too_little_shared_memory_or_disk(monkeypatch, tmp_path):
    item = resolved()
    with monkeypatch.context() as patch:
        small = doctor_machine.shutil._ntuple_diskusage(100, 90, 10)
        patch.setattr(doctor_machine.shutil, "disk_usage", lambda path: small)
        for check, subject, status in (
            (doctor_machine.shared_memory, item, "WARN"),  # Ray falls back to a file
            (doctor_machine.shared_memory, cuda(), "FAIL"),
            (doctor_machine.disk, item, "FAIL"),
        ):
            (finding,) = check(subject)
            assert finding.status == status
            assert finding.hint
        model = write_model(tmp_path / "model")
        assert main(["run", "--model-root", str(model)]) == 2  # met in a run's preflight
    monkeypatch.setattr(doctor_machine, "SHARED_MEMORY", tmp_path / "none")
    (finding,) = doctor_machine.shared_memory(cuda())
    assert finding.status == "FAIL"
    blocked = tmp_path / "file"
    blocked.write_text("")
    (finding,) = doctor_machine.disk(resolved("--output-root", str(blocked / "x")))
    assert (finding.status, "not writable" in finding.found) == ("FAIL", True)


def test_more_threads_than_cores_is_a_warning():
    found = by_name(doctor_machine.threads(resolved("--threads", "1000")))
    assert found["threads"].status == "WARN"


def test_an_unreadable_path(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.setattr(doctor_inputs.os, "access", lambda path, mode: False)
    (finding,) = doctor_inputs.paths(resolved("--model-root", str(folder)))
    assert (finding.status, "not readable" in finding.found) == ("FAIL", True)


def test_checkpoint_shards_and_shape(tmp_path):
    folder = write_config(tmp_path / "model", num_key_value_heads=4)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    (folder / "1.safetensors").write_bytes(b"")
    found = by_name(doctor_inputs.checkpoint(cuda("--model-root", str(folder))))
    assert found["model files"].found == "missing 2.safetensors"
    assert (found["model"].status, found["reference checkpoint"].status) == ("FAIL", "FAIL")
    (finding,) = doctor_inputs.checkpoint(cuda())
    assert (finding.status, finding.found) == ("FAIL", "none")


def test_prompts_against_their_manifest(tmp_path):
    file = tmp_path / "p.jsonl"
    item = resolved("--prompt-data", str(file))
    assert [finding.status for finding in doctor_inputs.prompts(item)] == ["FAIL"]
    file.write_text("{}\n")
    assert [finding.status for finding in doctor_inputs.prompts(item)] == ["WARN"]
    manifest = tmp_path / "p.jsonl.manifest.json"
    for digest, status in ((hashlib.sha256(file.read_bytes()).hexdigest(), "PASS"), ("0" * 64, "FAIL")):
        manifest.write_text(json.dumps({"output_sha256": digest}))
        assert [finding.status for finding in doctor_inputs.prompts(item)] == [status]


def test_checkouts_that_are_missing_or_elsewhere(tmp_path):
    found = by_name(doctor_inputs.checkouts(cuda()))
    assert (found["checkout vime"].status, found["checkout megatron"].status) == ("FAIL", "FAIL")
    assert "rlk-repro prepare" in found["checkout vime"].hint
    found = by_name(doctor_inputs.checkouts(cuda("--vime-root", str(REPOSITORY))))
    assert (found["checkout vime"].status, found["checkout vime"].expected) == ("FAIL", "1a113710e80a with 0 patches")


def test_a_workspace_in_a_checkout_is_no_change_of_it(tmp_path):
    for name in ("rl_engine/a.py", "ws/data/plan.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("1")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=test", "-c", "user.email=test@example.invalid")
    for command in (("init", "-q"), ("add", "rl_engine"), ("commit", "-q", "-m", "one")):
        subprocess.run([*git, *command], check=True, capture_output=True)
    item = resolved("--rl-kernel-root", str(tmp_path))
    assert by_name(doctor_inputs.checkouts(item))["checkout rl_kernel clean"].status == "PASS"
    (tmp_path / "rl_engine" / "b.py").write_text("1")
    assert by_name(doctor_inputs.checkouts(item))["checkout rl_kernel clean"].found == "1 uncommitted changes"


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (Answer({"state": "fresh"}), "PASS"),
        (Answer({"state": "stale", "detail": "torch 2.12.0"}), "FAIL"),
        (Answer({"state": "none"}), "WARN"),
        (Answer({}, "no answer within 60 s"), "WARN"),
    ],
)
def test_qualification(monkeypatch, answer, status):
    monkeypatch.setattr(doctor_inputs, "ask", lambda *arguments: answer)
    (finding,) = doctor_inputs.qualification(resolved())
    assert finding.status == status


def test_doctor_imports_no_torch():
    code = (
        "import sys, rl_engine.checks.doctor; "
        "print([name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])"
    )
    out, error = run_child([sys.executable, "-c", code], 60, {"PYTHONPATH": str(REPOSITORY)})
    assert (out.strip(), error) == ("[]", "")
