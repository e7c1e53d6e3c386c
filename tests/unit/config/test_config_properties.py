"""Two hundred random profiles and flag sets: a plan that round-trips with a stable digest, or one line."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_engine.config.codec import plan_digest, plan_from_json, plan_to_json
from rl_engine.config.document import plan_document, plan_text
from rl_engine.config.host import HostFacts
from rl_engine.config.options import OPTIONS
from rl_engine.config.paths import REPOSITORY
from rl_engine.config.resolve import Request, resolve
from rl_engine.records.errors import UserError

BODIES = [json.loads(file.read_text()) for file in sorted((REPOSITORY / "configs").rglob("*.json"))]
NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)

NUMBERS = st.one_of(
    st.sampled_from(
        ["1", "2", "3", "4", "8", "16", "0", "-1", "0.7", "0.95", "1.0", "1e-5", "nan", "inf", "", "x", "1e400"]
    ),
    st.integers(-3, 70000).map(str),
    st.floats().map(str),
)


GOOD = {"rollout_temperature": ["0.7", "1.3"], "rollout_top_p": ["0.8", "1.0"], "rollout_top_k": ["-1", "20"]}


def text_for(option) -> st.SearchStrategy:
    """Mostly values that are right on their own, so that combinations are judged too."""
    if option.kind == "switch":
        return st.just(True)
    if option.kind == "choice":
        return st.sampled_from([*option.choices, *option.choices, "other"])
    if option.kind == "str":
        return st.sampled_from(["a", "run.1", "linear", "linear@train", "http://127.0.0.1:1", "../x", ""])
    good = st.sampled_from(GOOD.get(option.name, ["1", "2", "4", "8"] if option.kind == "int" else ["0.25", "0.5"]))
    return st.one_of(good, good, good, good, good, NUMBERS)


@st.composite
def flag_sets(draw) -> dict[str, object]:
    names = draw(st.sets(st.sampled_from(range(len(OPTIONS))), max_size=3))
    return {OPTIONS[index].name: draw(text_for(OPTIONS[index])) for index in sorted(names)}


@st.composite
def default_sets(draw) -> dict[str, object]:
    wild = draw(st.integers(0, 3)) == 0
    if wild:
        value = st.one_of(
            st.integers(-1, 16), st.floats(allow_nan=False), st.booleans(), st.sampled_from(["native", "x"])
        )
        return draw(st.dictionaries(st.sampled_from([*(option.name for option in OPTIONS), "sead"]), value, max_size=2))
    small = st.sampled_from([1, 2, 4, 8])
    names = ["rollouts", "rollout_tp_size", "seed", "max_response_len", "max_tokens_per_gpu", "threads", "rollout_seed"]
    return draw(st.dictionaries(st.sampled_from(names), small, max_size=3))


REQUIREMENTS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({}, optional={"gpus": st.integers(0, 9), "tensor_parallel": st.integers(0, 9)}),
)


@st.composite
def requests(draw, tmp: Path) -> Request:
    body = json.loads(json.dumps(draw(st.sampled_from(BODIES))))
    body["defaults"].update(draw(default_sets()))
    body["requirements"].update(draw(REQUIREMENTS))
    profile = tmp / "profile.json"
    profile.write_text(json.dumps(body))
    kind = draw(st.sampled_from([None, "cuda", "rocm"]))
    return Request(
        verb=draw(st.sampled_from(["plan", "run", "verify"])),
        flags=draw(flag_sets()),
        path_flags=draw(st.sampled_from([{"workspace": "/w"}, {"workspace": "/w", "prompt_data": "p.jsonl"}, {}])),
        profile=str(profile),
        env=draw(st.sampled_from([{}, {"RLK_REPRO_DATA_ROOT": "d"}, {"RAY_API_SERVER_ADDRESS": "http://h:1"}])),
        cwd=tmp,
        host=HostFacts(draw(st.integers(1, 8)), kind, draw(st.booleans())),
        now=NOW,
        detach=draw(st.booleans()),
    )


def test_random_profiles_and_flags(tmp_path):
    outcomes = {"planned": 0, "refused": 0}

    @settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data):
        request = data.draw(requests(tmp_path))
        try:
            resolved = resolve(request)
        except UserError as error:
            assert "\n" not in str(error), error
            assert str(error).startswith("found ")
            outcomes["refused"] += 1
            return
        outcomes["planned"] += 1
        again = resolve(request)
        for item, second in zip(resolved, again, strict=True):
            text = plan_to_json(item.plan)
            assert plan_from_json(text) == item.plan
            assert plan_digest(item.plan) == plan_digest(second.plan) == plan_digest(plan_from_json(text))
            shape = item.plan.topology
            assert min(shape.train_tp, shape.train_cp, shape.rollout_tp, shape.rollout_cp, shape.rollout_engines) >= 1
            assert item.plan.model.num_kv_heads % shape.train_tp == 0
        json.loads(json.dumps(plan_document(resolved), allow_nan=False))
        assert plan_text(resolved).startswith("profile ")

    check()
    assert min(outcomes.values()) >= 30, outcomes  # both outcomes are really exercised
