"""Math rewards: what is extracted, what counts as equal, and that no response can hang or end the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_engine.records.errors import UserError
from rl_engine.rewards import checker
from rl_engine.rewards.extract import final_answer, last_boxed, last_number
from rl_engine.rewards.math import MathReward, open_reward, reward_name

REPOSITORY = Path(__file__).parents[3]
# One C call of the interpreter that would last for years.
HOPELESS = "\\boxed{9^{9^{9^{9}}}}"


@pytest.fixture(scope="module")
def arithmetic() -> Iterator[MathReward]:
    reward = open_reward("arithmetic")
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def math() -> Iterator[MathReward]:
    reward = open_reward("math")
    yield reward
    reward.close()


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and was not collected counts as ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def ends_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7. The answer is 7.", "7"),
        ("it costs $1,234.50!", "1234.50"),
        ("1,2", "2"),
        ("12,3456", "3456"),
        ("8-3", "3"),
        ("8 -3", "3"),
        ("= -3", "-3"),
        ("= −3", "-3"),
        ("x-3", "3"),
        ("(2)-3", "3"),
        ("-3", "-3"),
        ("007", "007"),
        ("٧ apples", None),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{5} and \\boxed{\\frac{1}{2}} of 9", "\\frac{1}{2}"),
        ("\\boxed{5", None),
        ("\\boxed{}", None),
        ("5", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.one_of(st.sampled_from("\\boxed{}0123456789,.- "), st.characters()), max_size=200))
def test_extraction_takes_any_text(text: str) -> None:
    found = final_answer(text)
    assert found is None or found


@pytest.mark.parametrize(
    ("text", "answer", "value", "reason"),
    [
        ("3 + 4 = 7. The answer is 7.", "7", 1.0, "correct"),
        ("3 + 4 = 8. The answer is 8.", "7", 0.0, "wrong"),
        ("\\boxed{7} as 3 + 4", "7", 1.0, "correct"),
        ("\\boxed{\\frac{14}{2}}", "7", 1.0, "correct"),
        ("The answer is -4", "-4", 1.0, "correct"),
        ("The answer is 4", "-4", 0.0, "wrong"),
        ("1,080", "1080", 1.0, "correct"),
        ("7.0", "7", 1.0, "correct"),
        ("", "7", 0.0, "empty"),
        (" \n\t", "7", 0.0, "empty"),
        ("seven", "7", 0.0, "no answer"),
        ("9" * 5_000, "7", 0.0, "too long"),
        ("\\boxed{" * 50_000 + "7", "7", 1.0, "correct"),
        ("🙂\ud800\x00 ünï 7", "7", 1.0, "correct"),
        ("x" * 2_000_000 + "7", "7", 1.0, "correct"),
    ],
)
def test_arithmetic_reward(arithmetic: MathReward, text: str, answer: str, value: float, reason: str) -> None:
    (result,) = arithmetic.reward([text], [answer])
    assert (result.value, result.reason) == (value, reason)


@pytest.mark.parametrize(
    ("text", "answer", "value"),
    [
        ("so it is $\\frac{1}{2}$", "0.5", 1.0),
        ("It is \\boxed{x^2 + 2x}", "x(x+2)", 1.0),
        ("He earns $10 a day.", "10", 1.0),
        ("He earns $11 a day.", "10", 0.0),
        ("$" * 5_000, "1", 0.0),
        ("\\frac" * 3_000, "1", 0.0),
        ("import os; os._exit(1)", "1", 0.0),
    ],
)
def test_math_reward(math: MathReward, text: str, answer: str, value: float) -> None:
    assert math.reward([text], [answer])[0].value == value


def test_hopeless_expressions_time_out_and_the_next_is_judged() -> None:
    with MathReward("number", time_limit=1.0) as reward:
        reward.reward(["1"], ["1"])
        began = time.monotonic()
        hopeless, fine = reward.reward([HOPELESS, "7"], ["7", "7"])
        assert (hopeless.value, hopeless.reason) == (0.0, "timeout")
        assert hopeless.extracted == "9^{9^{9^{9}}}"
        assert fine.reason == "correct"
        assert time.monotonic() - began >= 1.0


def test_a_lost_child_costs_no_response_its_reward() -> None:
    with MathReward("number") as reward:
        reward.reward(["1"], ["1"])
        first = reward._checker.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert reward.reward(["7"], ["7"])[0].reason == "correct"
        assert reward._checker.pid != first


def test_child_starts_late_and_close_ends_it() -> None:
    reward = MathReward("number")
    assert reward._checker.pid is None
    reward.start()
    child = reward._checker.pid
    assert child is not None and is_alive(child)
    reward.close()
    assert not is_alive(child)
    reward.close()


@pytest.mark.parametrize("busy", [False, True])
def test_child_does_not_survive_its_parent(busy: bool) -> None:
    """The parent is killed outright, with the child idle, and inside one endless C call."""
    program = (
        "from rl_engine.rewards.checker import AnswerChecker\n"
        "checker = AnswerChecker(time_limit=1.0)\n"
        "checker.compare('value', '1', '1')\n"
        "print(checker.pid, flush=True)\n"
        + ("checker._time_limit = 1.0; checker._read_reply = lambda deadline: input()\n" if busy else "input()\n")
        + f"checker.compare('value', {HOPELESS!r}, '1')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None and parent.stdin is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    if busy:
        time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()
    assert ends_within(child, 15.0)


def test_a_broken_library_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('no antlr')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with MathReward("number") as reward, pytest.raises(UserError, match="no antlr"):
        reward.reward(["7"], ["7"])


def test_a_child_that_never_comes_up_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "silent.py"
    silent.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(checker, "_WORKER", silent)
    slow = checker.AnswerChecker(start_limit=0.2)
    with pytest.raises(checker.CheckerUnavailable, match="did not start"):
        slow.compare("value", "1", "1")
    assert slow.pid is None


@pytest.mark.parametrize(("end", "words"), [("os.kill(os.getpid(), 9)", "signal 9"), ("os._exit(7)", "exit code 7")])
def test_a_child_that_dies_on_its_way_up_is_no_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, words: str
) -> None:
    """It was exit 2 with a hint to install math-verify; now one death costs nothing, and two end the run."""
    dying = tmp_path / "dying.py"
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    dying.write_text(f"import os\n{count}\n{end}\n")
    monkeypatch.setattr(checker, "_WORKER", dying)
    with MathReward("number") as reward, pytest.raises(checker.CheckerUnavailable, match=words) as raised:
        reward.reward(["7"], ["7"])
    assert not raised.value.missing and (tmp_path / "count").read_text() == "xx"


def test_one_death_on_the_way_up_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once, real = tmp_path / "once.py", str(checker._WORKER)
    died = tmp_path / "died"
    once.write_text(
        f"import os, runpy\nif not os.path.exists({str(died)!r}):\n    open({str(died)!r}, 'w')\n"
        f"    os.kill(os.getpid(), 9)\nrunpy.run_path({real!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(checker, "_WORKER", once)
    with MathReward("number") as reward:
        assert reward.reward(["7"], ["7"])[0].value == 1.0


def test_names_and_lengths(arithmetic: MathReward) -> None:
    assert (reward_name("arithmetic"), reward_name("jsonl")) == ("arithmetic", "math")
    with pytest.raises(UserError, match="arithmetic or math"):
        open_reward("style")
    with pytest.raises(ValueError, match="2 responses, 1 answers"):
        arithmetic.reward(["1", "2"], ["1"])
    assert arithmetic.reward([], []) == []
