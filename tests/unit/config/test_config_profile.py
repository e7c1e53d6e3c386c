"""The profile schema: unknown keys name the nearest known one, wrong values say where."""

from __future__ import annotations

import copy
import json

import pytest

from rl_engine.config.paths import REPOSITORY
from rl_engine.config.profile import check_profile, read_profile
from rl_engine.records.errors import UserError

BODY = json.loads((REPOSITORY / "configs/demo/cpu-smollm2.json").read_text())


def bundled():
    return sorted((REPOSITORY / "configs").rglob("*.json"))


@pytest.mark.parametrize("file", bundled(), ids=lambda file: file.name)
def test_bundled_profiles_are_valid(file):
    read_profile(file)


def changed(*path, value):
    body = copy.deepcopy(BODY)
    inner = body
    for part in path[:-1]:
        inner = inner.setdefault(part, {})
    inner[path[-1]] = value
    return body


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (changed("defautls", value={}), "did you mean defaults"),
        (changed("requirements", "gpu", value=1), "did you mean gpus"),
        (changed("defaults", "rollout_temprature", value=1.0), "did you mean rollout_temperature"),
        (changed("paths", "model_rot", value="x"), "did you mean model_root"),
        (changed("repositories", "vim", value={}), "did you mean vime"),
        (changed("repositories", "vime", value={"revison": {}}), "unknown key repositories.vime.revison"),
        (changed("modes", "native", value={"providers": {"train": {"liner": "cpu"}}}), "did you mean linear"),
        (changed("defaults", "rollout_temperature", value=0), "above 0"),
        (changed("defaults", "rollouts", value="3x"), "whole number"),
        (changed("defaults", "rollouts", value=True), "whole number"),
        (changed("defaults", "allow_dirty", value="yes"), "true or false"),
        (changed("schema_version", value="v0"), "rlkernel.repro.profile.v1"),
        (changed("name", value=""), "name"),
        (changed("requirements", "gpus", value="8"), "requirements.gpus"),
        (changed("repositories", "vime", value={"revisions": {"native": "main"}}), "revisions.native"),
        (changed("runner_args", value=[["--lr", "1"]]), "--lr.* option --lr also sets"),
        (changed("runner_args", value=[["--context-parallel-size", "1"]]), "option --cp-size also sets"),
        (changed("runner_args", value=[["lr", "1"]]), "starts with --"),
        (changed("contract", value="rlk.v0"), "rlk.v1"),
        (changed("defaults", "stack", value="vime"), "remove defaults.stack"),
        ([], "JSON object"),
    ],
)
def test_refused_profiles(body, message):
    with pytest.raises(UserError, match=message) as caught:
        check_profile(body, "p.json")
    assert "\n" not in str(caught.value)


def test_unreadable_profiles(tmp_path):
    for name, content, message in (
        ("bad.json", b"{", "not JSON"),
        ("twice.json", b'{"name": 1, "name": 2}', "twice"),
        ("latin.json", b"\xff\xfe", "not UTF-8"),
        ("deep.json", b"[" * 100000, "not JSON"),
    ):
        file = tmp_path / name
        file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_profile(file)
    with pytest.raises(UserError, match="No such file"):
        read_profile(tmp_path / "none.json")
    with pytest.raises(UserError, match="directory"):
        read_profile(tmp_path)


def test_a_count_beyond_every_machine_is_refused():
    """Memory in GiB of such a shape is no float any more."""
    body = copy.deepcopy(BODY)
    body["model"]["num_layers"] = 10**300
    with pytest.raises(UserError, match=r"model\.num_layers"):
        check_profile(body, "here")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(BODY), encoding="utf-8-sig")
    assert file.read_bytes()[:3] == b"\xef\xbb\xbf"
    assert read_profile(file) == check_profile(BODY, "profile.json")
