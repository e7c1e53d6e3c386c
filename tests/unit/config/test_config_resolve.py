"""Precedence, derived values, refusals and the demo profile."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from rl_engine.config.codec import plan_digest, plan_from_json, plan_to_json
from rl_engine.config.document import plan_document, profile_line
from rl_engine.config.host import HostFacts, has_c_compiler
from rl_engine.config.model_facts import pad_vocab
from rl_engine.config.options import FUSED_OPERATORS, OPERATORS
from rl_engine.config.paths import REPOSITORY
from rl_engine.config.preflight import check_inputs, refuse_unbuilt, wants_demo_model
from rl_engine.config.resolve import KEPT_OURS
from rl_engine.numerics.contract import Contract
from rl_engine.numerics.providers import control, defaults
from rl_engine.records.errors import UserError
from tests.helpers.checkpoints import write_config, write_model

DEMO = REPOSITORY / "configs/demo/cpu-smollm2.json"


def value_of(item, name):
    return next(value for value in item.values if value.name == name)


def test_demo_profile_is_the_paired_experiment(plan_for):
    native, consistency = plan_for()
    for item, mode in ((native, "native"), (consistency, "consistency")):
        plan = item.plan
        assert (plan.mode, plan.stack, plan.backend, plan.profile) == (mode, "builtin", "cpu", "cpu-smollm2")
        assert (plan.rollouts, plan.data.prompts_per_step, plan.data.samples_per_prompt) == (3, 2, 8)
        assert (plan.global_batch_size, plan.sampling.max_response_len, plan.optimizer.lr) == (16, 40, 1e-5)
        assert (plan.sampling.top_p, plan.sampling.temperature, plan.sampling.top_k) == (1.0, 1.0, -1)
        assert (plan.fold_tokens, plan.max_tokens_per_gpu, plan.threads) == (512, 1024, 2)
        assert (plan.data.source, plan.data.path) == ("arithmetic", None)
        assert plan.run_id == f"paired-tp1cp1-20260102T030405678901Z-{mode}"
        assert plan.pair_id == "paired-tp1cp1-20260102T030405678901Z"
        assert plan.contract_id == "rlk.v1/cpu"
    assert native.plan.contract_digest == consistency.plan.contract_digest


def test_arms_differ_in_providers_alone(plan_for):
    native, consistency = (item.plan for item in plan_for())
    assert set(dict(consistency.providers.train).values()) == {"cpu"}
    assert consistency.providers.rollout == consistency.providers.train
    ours = {operator for operator, provider in native.providers.train if provider == "cpu"}
    assert ours == {"sample", "adamw", "grad_norm"}
    assert native.providers.rollout == native.providers.train
    assert {operator for operator, _ in native.providers.train} == set(OPERATORS)
    blank = {"mode": "", "run_id": "", "run_dir": "", "providers": native.providers}
    assert dataclasses.replace(native, **blank) == dataclasses.replace(consistency, **blank)


def test_without_a_compiler_the_fallback_has_its_own_contract(plan_for):
    native, consistency = plan_for(host=HostFacts(2, None, chain=False))
    assert set(dict(consistency.plan.providers.train).values()) == {"torch"}
    assert dict(native.plan.providers.train)["sample"] == "torch"
    assert consistency.plan.contract_id == "rlk.v1/cpu-chain256"


def test_plans_take_the_tables_defaults_and_their_control(plan_for):
    for chain in (True, False):
        native, consistency = plan_for(host=HostFacts(2, None, chain=chain))
        for side in ("train", "rollout"):
            assert dict(getattr(consistency.plan.providers, side)) == defaults("cpu", chain)
            assert dict(getattr(native.plan.providers, side)) == control(defaults("cpu", chain))


def test_what_config_may_not_import_is_equal_to_the_operators_room(monkeypatch):
    ops = pytest.importorskip("rl_engine.ops")
    library = pytest.importorskip("rl_engine.ops.library")
    assert set(ops.OPERATORS) == set(OPERATORS)
    assert pytest.importorskip("rl_engine.ops.operators").FUSED == FUSED_OPERATORS
    assert not set(FUSED_OPERATORS) & set(OPERATORS)
    assert all(set(parts) <= set(OPERATORS) for parts in FUSED_OPERATORS.values())
    for path, cc in (
        (os.environ["PATH"], ""),
        ("/nowhere", ""),
        ("/nowhere", "sh"),
        (os.environ["PATH"], "nothing-here"),
    ):
        monkeypatch.setenv("PATH", path)
        monkeypatch.setenv("CC", cc)
        assert has_c_compiler() == library.available()


def test_precedence_and_provenance(plan_for, tmp_path):
    body = json.loads(DEMO.read_text())
    body["defaults"]["seed"] = 7
    body["paths"] = {"data_root": "from-profile", "output_root": "runs"}
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps(body))
    env = {"RLK_REPRO_DATA_ROOT": str(tmp_path / "from-env"), "RLK_REPRO_MODEL_ROOT": ""}
    (item,) = plan_for(profile=profile, env=env, mode="native", lr="0.5")
    assert (value_of(item, "seed").value, value_of(item, "seed").source) == (7, "profile")
    assert value_of(item, "seed").origin == "defaults.seed"
    assert (item.plan.optimizer.lr, value_of(item, "lr").source) == (0.5, "flag")
    assert (value_of(item, "data_root").value, value_of(item, "data_root").source) == (
        str(tmp_path / "from-env"),
        "env",
    )
    assert value_of(item, "output_root").value == str(tmp_path / "runs")  # relative to the profile's folder
    assert value_of(item, "model_root").source == "derived"  # an empty variable is an unset one
    assert value_of(item, "prompt_data").value == str(tmp_path / "from-env/datasets/dapo-math-17k.vime.jsonl")
    (item,) = plan_for(profile=profile, env=env, paths={"data_root": "/flag"}, mode="native")
    assert (value_of(item, "data_root").value, value_of(item, "data_root").source) == ("/flag", "flag")


def test_profile_lookup_order(plan_for, tmp_path):
    body = json.loads(DEMO.read_text())

    def write(name: str) -> Path:
        file = tmp_path / (name + ".json" if name != ".rlk-profile.json" else name)
        file.write_text(json.dumps({**body, "name": name}))
        return file

    flag, variable = write("flag"), write("variable")
    assert plan_for()[0].profile.why.startswith("bundled demo profile")
    write(".rlk-profile.json")
    assert plan_for()[0].plan.profile == ".rlk-profile.json"
    assert plan_for(env={"RLK_REPRO_PROFILE": str(variable)})[0].plan.profile == "variable"
    assert plan_for(profile=flag, env={"RLK_REPRO_PROFILE": str(variable)})[0].plan.profile == "flag"


A100 = HostFacts(8, "cuda", True, gpus=1, refused="NVIDIA A100 has compute capability 8.0")


def test_a_gpu_that_would_be_refused_is_not_the_default(plan_for, tmp_path):
    """The CPU's demo, with one line that says why and how to ask; a GPU asked for by flag or profile stays."""
    native, consistency = plan_for(host=A100)
    assert (native.plan.profile, native.plan.backend) == ("cpu-smollm2", "cpu")
    assert dict(consistency.plan.providers.rollout)["linear"] == "cpu"
    line = profile_line(native)
    assert "A100 has compute capability 8.0; --backend cuda asks for the GPU all the same" in line and "\n" not in line
    assert plan_document([native])["profile"]["why"] in line
    assert value_of(native, "backend").source == "profile"
    for asked in (
        plan_for(host=A100, backend="cuda"),
        plan_for(host=A100, profile=REPOSITORY / "configs/demo/one-gpu.json"),
        plan_for(host=dataclasses.replace(A100, refused="")),
    ):
        assert (asked[0].plan.profile, asked[0].plan.backend) == ("one-gpu-smollm2", "cuda")
    amd = HostFacts(8, "rocm", True, refused="AMD")
    assert plan_for(host=amd)[0].plan.backend == "cpu"
    assert plan_for(host=amd, backend="rocm")[0].plan.profile == "one-gpu-smollm2"
    workspace = {"workspace": str(tmp_path / "ws"), "model_root": "/models/Qwen3-8B"}
    assert plan_for(host=A100, paths=workspace, mode="consistency")[0].plan.stack == "vime"


def test_the_demo_of_the_backend_asked_for(plan_for):
    """What hints send to: the CPU's demo, whose samples a CPU can compute."""
    hopper = HostFacts(8, "cuda", True, gpus=1)
    item = plan_for(host=hopper, backend="cpu")[0]
    assert item.plan.profile == "cpu-smollm2" and item.profile.why == "bundled demo profile: --backend cpu"


def test_tp_flag_discards_the_profiles_cp(plan_for):
    item = plan_for(tp_size="3", rollout_tp_size="3")[0]
    assert (item.plan.topology.train_tp, item.plan.topology.train_cp) == (3, 1)
    assert value_of(item, "cp_size").source == "derived"
    shape = plan_for(tp_size="3", cp_size="2")[0].plan.topology
    assert (shape.train_tp, shape.train_cp, shape.rollout_engines) == (3, 2, 6)


def test_batch_flags_discard_the_profiles_product(plan_for, tmp_path):
    body = json.loads(DEMO.read_text())
    body["defaults"]["global_batch_size"] = 16
    profile = tmp_path / "p.json"
    profile.write_text(json.dumps(body))
    assert value_of(plan_for(profile=profile)[0], "global_batch_size").source == "profile"
    assert plan_for(profile=profile, samples_per_prompt="4")[0].plan.global_batch_size == 8
    with pytest.raises(UserError, match="their product"):
        plan_for(profile=profile, samples_per_prompt="4", global_batch_size="16")


def test_micro_batch_budget_holds_a_fold_unit_and_a_sample(plan_for):
    assert plan_for()[0].plan.max_tokens_per_gpu == 1024  # the profile's
    item = plan_for(max_response_len="3000")[0]
    assert (item.plan.max_tokens_per_gpu, value_of(item, "max_tokens_per_gpu").source) == (3512, "derived")
    assert plan_for(fold_tokens="2048", cp_size="3")[0].plan.max_tokens_per_gpu == 1024
    for flags in ({"max_response_len": "600"}, {"fold_tokens": "601"}):
        with pytest.raises(UserError, match="a micro-batch that holds it whole"):
            plan_for(max_tokens_per_gpu="600", **flags)


def test_verify_has_its_own_defaults(plan_for):
    plan = plan_for(verb="verify", mode="consistency")[0].plan
    assert (plan.rollouts, plan.require_updates, plan.loss.kl_coef, plan.sampling.max_response_len) == (
        2,
        True,
        0.01,
        512,
    )
    assert plan_for(verb="verify", mode="consistency", rollouts="5")[0].plan.rollouts == 5


def test_prompt_data_given_means_jsonl(plan_for):
    plan = plan_for(paths={"prompt_data": "/data/p.jsonl"})[0].plan
    assert (plan.data.source, plan.data.path) == ("jsonl", "/data/p.jsonl")
    with pytest.raises(UserError, match="one of the two"):
        plan_for(paths={"prompt_data": "/data/p.jsonl"}, data_source="arithmetic")


def test_native_override_keeps_operators_stock(plan_for):
    plan = plan_for(mode="consistency", native="linear@train,attention")[0].plan
    train, rollout = dict(plan.providers.train), dict(plan.providers.rollout)
    assert (train["linear"], rollout["linear"], train["attention"], rollout["attention"]) == (
        "stock",
        "cpu",
        "stock",
        "stock",
    )
    with pytest.raises(UserError, match="in native mode every operator is stock already"):
        plan_for(mode="native", native="linear")


REFUSED = [
    ({"rollout_temperature": text}, "above 0") for text in ("0", "0.0", "-1", "nan", "inf", "-inf", "1e999", "warm", "")
]
REFUSED += [({"rollout_top_p": text}, r"in \(0, 1\]") for text in ("0", "-0.1", "1.0000001", "nan", "x")]
REFUSED += [({"rollout_top_k": text}, "-1 .no filter.") for text in ("0", "-2", "1.5", "x")]
REFUSED += [({"rollout_top_k": "49153"}, "the vocabulary")]
REFUSED += [
    ({name: "0"}, "at least 1|in .1") for name in ("rollouts", "tp_size", "samples_per_prompt", "max_response_len")
]
REFUSED += [({name: text}, "number") for name in ("seed", "lr", "kl_coef") for text in ("x", "--", "1e")]
REFUSED += [({"lr": "0"}, "above 0"), ({"lr": "nan"}, "finite"), ({"weight_decay": "-1"}, "at least 0")]
REFUSED += [({"seed": "9" * 400}, "whole number"), ({"rollouts": "1_0"}, "whole number")]
REFUSED += [({"mode": "consistancy"}, "did you mean consistency"), ({"backend": "tpu"}, "cpu, cuda, rocm")]
REFUSED += [({"native": "linaer"}, "did you mean linear"), ({"native": "linear@both"}, "@train or @rollout")]
REFUSED += [
    ({"run_id": text}, "one path component") for text in ("..", ".", "../x", "a/b", "/abs", "a b", "-x", "x" * 129)
]
REFUSED += [({"global_batch_size": "7"}, "their product"), ({"tp_size": "2"}, "--tp 1 or 3")]
REFUSED += [({"stack": "vime"}, "use --stack builtin"), ({"ray_address": "http://h:1"}, "own Ray head")]
REFUSED += [
    ({"rollout_stop": text}, "JSON list of non-empty") for text in ("[", "[]", "[1]", '[""]', '["a", null]', "[" * 9999)
]


@pytest.mark.parametrize(
    ("text", "stops"),
    [("", ()), ("User:", ("User:",)), ('["\\n\\n", "User:"]', ("\n\n", "User:")), ('{"a": 1}', ('{"a": 1}',))],
)
def test_stop_texts(plan_for, text, stops):
    flags = {"rollout_stop": text} if text else {}
    plan = plan_for(**flags)[1].plan
    assert plan.sampling.stop_strings == stops
    assert plan_from_json(plan_to_json(plan)) == plan


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=lambda part: str(part)[:40])
def test_refused_values(plan_for, flags, message):
    with pytest.raises(UserError, match=message) as caught:
        plan_for(**flags)
    assert "\n" not in str(caught.value)


def test_plan_round_trips_and_its_digest_is_stable(plan_for):
    plan = plan_for()[1].plan
    text = plan_to_json(plan)
    assert plan_from_json(text) == plan
    assert plan_digest(plan_from_json(text)) == plan_digest(plan) == plan_digest(plan_for()[1].plan)
    assert plan_digest(plan_for(lr="3e-5")[1].plan) != plan_digest(plan)


@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body.pop("seed"),
        lambda body: body.update(extra=1),
        lambda body: body.update(seed="1"),
        lambda body: body.update(seed=True),
        lambda body: body["sampling"].update(top_k=1.5),
        lambda body: body["providers"].update(train=[["linear"]]),
    ],
)
def test_damaged_plan_is_refused(plan_for, damage):
    body = json.loads(plan_to_json(plan_for()[0].plan))
    damage(body)
    with pytest.raises(UserError):
        plan_from_json(json.dumps(body))


def test_model_facts_come_from_the_checkpoint(plan_for, tmp_path):
    folder = write_config(tmp_path / "model", head_dim=32)
    plan = plan_for(paths={"model_root": str(folder)}, tp_size="2")[0].plan
    assert plan.model is not None
    assert (plan.model.num_layers, plan.model.head_dim, plan.model.vocab_size, plan.model.padded_vocab_size) == (
        2,
        32,
        1000,
        1024,
    )
    broken = write_config(tmp_path / "broken", hidden_size="64")
    with pytest.raises(UserError, match="hidden_size"):
        plan_for(paths={"model_root": str(broken)})


def test_inputs_that_a_run_needs(plan_for, tmp_path):
    folder = write_model(tmp_path / "model")
    paths = {"model_root": str(folder), "output_root": str(tmp_path / "runs")}
    check_inputs(plan_for(paths=paths))
    assert wants_demo_model(plan_for(paths=paths)[0]) is None
    assert wants_demo_model(plan_for()[0]) == tmp_path / ".rlk-workspace/models/SmolLM2-135M-Instruct"
    for wrong, message in (
        ({**paths, "model_root": str(tmp_path / "none")}, "no model directory"),
        ({**paths, "model_root": str(tmp_path)}, "no config.json"),
        ({**paths, "prompt_data": str(tmp_path / "none.jsonl")}, "no prompt file"),
        ({**paths, "output_root": str(folder / "config.json")}, "writable folder"),
    ):
        with pytest.raises(UserError, match=message):
            check_inputs(plan_for(paths=wrong))
    taken = plan_for(paths=paths, run_id="mine")
    Path(taken[1].plan.run_dir).mkdir(parents=True)
    with pytest.raises(UserError, match="never overwritten"):
        check_inputs(taken)


def test_what_is_not_built_is_refused(plan_for):
    refuse_unbuilt(plan_for())
    on_gpu = {"backend": "cuda", "tp_size": "3", "oversubscribe": True}
    for layout in ({"tp_size": "3"}, {"rollout_tp_size": "3"}, {"cp_size": "2"}, on_gpu):
        refuse_unbuilt(plan_for(mode="paired", **layout))  # torch's own operators too
    for build in (
        lambda: refuse_unbuilt(plan_for(stack="megatron-vllm")),
        lambda: refuse_unbuilt(plan_for(backend="rocm")),
        lambda: refuse_unbuilt(plan_for(pd=True)),
        lambda: refuse_unbuilt(plan_for(ray_port="8090")),
        lambda: refuse_unbuilt(plan_for(native_deterministic=True)),
        lambda: refuse_unbuilt(plan_for(vllm_gpu_memory_utilization="0.5")),
    ):
        with pytest.raises(UserError):
            build()


def test_runs_do_not_write_among_their_sources(plan_for):
    root = str(REPOSITORY)
    for name in ("workspace", "data_root", "output_root"):
        with pytest.raises(UserError, match="among the sources"):
            refuse_unbuilt(plan_for(paths={name: f"{root}/configs/demo/out"}))
        refuse_unbuilt(plan_for(paths={name: f"{root}/out"}))
    refuse_unbuilt(plan_for(paths={"workspace": root}))


def test_one_gpu_runs_with_the_providers_that_its_proof_names(plan_for):
    native, consistency = (
        item.plan for item in plan_for(backend="cuda", host=HostFacts(8, "cuda", True), mode="paired")
    )
    refuse_unbuilt(plan_for(backend="cuda"))
    products = {"linear": "cublaslt", "lm_head": "cublaslt"}
    for side in (consistency.providers.train, consistency.providers.rollout):
        assert dict(side) == {**dict.fromkeys(OPERATORS, "triton"), **products}
    kept = dict.fromkeys(KEPT_OURS, "triton")
    assert dict(native.providers.train) == {**dict.fromkeys(OPERATORS, "stock"), **kept}
    assert native.engine.graph_capture_sizes == ()
    assert consistency.engine.graph_capture_sizes == tuple(range(1, consistency.global_batch_size + 1))
    assert consistency.contract_id == "rlk.v1/cuda-sm90"
    assert (
        consistency.contract_digest == Contract(device_kind="cuda-sm90", fold_tokens=consistency.fold_tokens).digest()
    )


@pytest.mark.parametrize(
    ("gpus", "flags", "shape"),
    [
        (8, {"tp_size": "2"}, (2, 1, 1, 1, 2)),
        (8, {"tp_size": "2", "cp_size": "2"}, (2, 2, 1, 1, 4)),
        (8, {"rollout_tp_size": "4"}, (1, 1, 4, 1, 1)),
        (8, {}, (1, 1, 1, 1, 1)),
        (1, {"tp_size": "2", "oversubscribe": True}, (2, 1, 1, 1, 2)),
        (1, {"tp_size": "2"}, None),
        (2, {"tp_size": "3"}, None),
    ],
)
def test_built_in_ranks_take_the_gpus_they_ask_for(plan_for, tmp_path, gpus, flags, shape):
    profile = tmp_path / "profile.json"
    body = json.loads((REPOSITORY / "configs/demo/one-gpu.json").read_text())
    body["model"].update(num_heads=12, num_kv_heads=12)
    profile.write_text(json.dumps(body))
    host = HostFacts(8, "cuda", True, gpus=gpus)
    if shape is None:
        with pytest.raises(UserError, match="one per GPU"):
            plan_for(profile=profile, host=host, mode="consistency", **flags)
        return
    (item,) = plan_for(profile=profile, host=host, mode="consistency", **flags)
    assert dataclasses.astuple(item.plan.topology) == shape
    refuse_unbuilt([item])
    several = item.plan.topology.rollout_tp > 1
    assert bool(item.plan.engine.graph_capture_sizes) == (not several)


def test_padded_vocabulary():
    assert [pad_vocab(size) for size in (1, 1024, 1025, 49152, 151936)] == [1024, 1024, 2048, 49152, 152576]
