"""Prompt sources: determinism, epochs, broken files named by line, and encoding with and without a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_engine.data.arithmetic import ArithmeticPrompts
from rl_engine.data.jsonl import JsonlPrompts, bundled_gsm8k
from rl_engine.data.prompts import Prompt, encode_prompt, open_prompts
from rl_engine.records.errors import UserError


def question(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# -- arithmetic


@settings(max_examples=50, deadline=None)
@given(st.integers(-(2**63), 2**64), st.integers(0, 10**9), st.integers(1, 6), st.integers(0, 5))
def test_arithmetic_depends_on_seed_step_and_position_alone(seed: int, step: int, count: int, more: int) -> None:
    few = ArithmeticPrompts(seed).batch(step, count)
    source = ArithmeticPrompts(seed)
    source.batch(step + 1, 3)
    assert source.batch(step, count + more)[:count] == few
    assert [prompt.index for prompt in few] == list(range(count))


def test_arithmetic_answers_are_right_and_varied() -> None:
    prompts = [prompt for step in range(100) for prompt in ArithmeticPrompts(7).batch(step, 2)]
    signs = set()
    for prompt in prompts:
        left, sign, right = question(prompt).removeprefix("What is ").removesuffix("?").split()
        signs.add(sign)
        value = {"+": int(left) + int(right), "-": int(left) - int(right), "×": int(left) * int(right)}[sign]
        assert prompt.answer == str(value)
    assert signs == {"+", "-", "×"}
    assert len({question(prompt) for prompt in prompts}) > 60
    assert {question(prompt) for prompt in prompts} != {
        question(prompt) for step in range(100) for prompt in ArithmeticPrompts(8).batch(step, 2)
    }


# -- JSONL


def test_epochs_are_permutations_in_another_order(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *({"question": f"q{row}", "answer": str(row)} for row in range(10)))
    source = JsonlPrompts(path, seed=3)
    drawn = [prompt.answer for step in range(10) for prompt in source.batch(step, 3)]
    epochs = [drawn[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == sorted(map(str, range(10))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [prompt.answer for prompt in JsonlPrompts(path, 3).batch(4, 3)] == drawn[12:15]
    assert [prompt.answer for prompt in JsonlPrompts(path, 4).batch(0, 10)] != epochs[0]
    assert source.batch(2, 3)[1].index == 1
    assert source.batch(0, 1)[0].source == f"{tmp_path.name}/a.jsonl:{int(drawn[0]) + 1}"


def test_both_spellings_are_read(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "1+1\u2028?"}]
    path = write(
        tmp_path / "a.jsonl",
        {"question": "How many?", "answer": "3 + 4 = 7\n#### 7", "index": 4},
        {"prompt": turns, "label": "2", "data_source": "math_dapo"},
        {"prompt": "plain", "label": "\\frac{1}{2}"},
    )
    by_answer = {prompt.answer: prompt for prompt in JsonlPrompts(path, 0).batch(0, 3)}
    assert question(by_answer["7"]).startswith("How many?\n")
    assert by_answer["2"].messages == tuple(turns)
    assert question(by_answer["\\frac{1}{2}"]) == "plain"


def test_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"question": "q", "answer": "1"}\r\n{"question": "r", "answer": "2"}')
    assert len(JsonlPrompts(path, 0)) == 2


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"question": "a", "answer": ', "not JSON"),
        (b"", "an empty line"),
        (b"   ", "an empty line"),
        (b"[1, 2]", "a JSON array"),
        (b"null", "a JSON null"),
        (b'{"question": "a"}', 'no key "answer"'),
        (b'{"answer": "a"}', 'no key "question"'),
        (b'{"prompt": "a"}', 'no key "label"'),
        (b'{"question": "a", "answer": 5}', '"answer" is a JSON number'),
        (b'{"question": ["a"], "answer": "5"}', '"question" is a JSON array'),
        (b'{"question": "  ", "answer": "5"}', '"question" is empty'),
        (b'{"question": "a", "answer": "so #### "}', "nothing after ####"),
        (b'{"question": "\xff", "answer": "5"}', "not UTF-8 at column 15"),
        (b'{"question": "\\ud800", "answer": "5"}', "surrogate"),
        (b'{"prompt": [], "label": "5"}', 'an empty "prompt"'),
        (b'{"prompt": [{"role": "wizard", "content": "a"}], "label": "5"}', "a known role"),
        (b'{"prompt": [{"role": "user"}], "label": "5"}', 'no key "content"'),
        (b"[" * 100_000, "beyond any sensible size"),
        (b"1" * 10_000, "beyond any sensible size"),
    ],
)
def test_broken_line_is_named(tmp_path: Path, line: bytes, found: str) -> None:
    good = b'{"question": "a", "answer": "5"}'
    path = tmp_path / "a.jsonl"
    path.write_bytes(good + b"\n" + line + b"\n" + good + b"\n")
    with pytest.raises(UserError) as caught:
        JsonlPrompts(path, 0)
    message = str(caught.value)
    assert f"{path} line 2: " in message and found in message and "\n" not in message


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        JsonlPrompts(tmp_path / "none.jsonl", 0)
    with pytest.raises(UserError, match="directory"):
        JsonlPrompts(tmp_path, 0)
    for content in ("", "\n \n"):
        (tmp_path / "empty.jsonl").write_text(content)
        with pytest.raises(UserError, match="no rows"):
            JsonlPrompts(tmp_path / "empty.jsonl", 0)


def test_bundled_sample() -> None:
    assert (len(JsonlPrompts(bundled_gsm8k("train"), 0)), len(JsonlPrompts(bundled_gsm8k("test"), 0))) == (512, 128)
    assert "MIT License" in (bundled_gsm8k("train").parent / "LICENSE").read_text()


def test_open_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"question": "q", "answer": "1"})
    assert isinstance(open_prompts("arithmetic", None, 1), ArithmeticPrompts)
    assert open_prompts("jsonl", str(path), 1).batch(0, 1)[0].answer == "1"
    assert open_prompts("gsm8k", None, 1).batch(0, 1)[0].source.startswith("gsm8k/train.jsonl:")
    for source, file in (("jsonl", None), ("arithmetic", str(path)), ("other", None)):
        with pytest.raises(UserError):
            open_prompts(source, file, 1)


# -- encoding


class PlainTokenizer:
    """Code points as ids; the calls of a transformers tokenizer."""

    chat_template: str | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": ([0] if add_special_tokens and text.strip() else []) + [ord(c) for c in text.strip()]}


class ChatTokenizer(PlainTokenizer):
    chat_template = "a template"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"<{turn['role']}>{turn['content']}" for turn in messages) + "<assistant>"


PROMPT = Prompt(0, ({"role": "system", "content": "s"}, {"role": "user", "content": "u"}), "1", "test:1")


def test_template_is_used_without_a_second_start_token() -> None:
    assert encode_prompt(ChatTokenizer(), PROMPT) == [ord(c) for c in "<system>s<user>u<assistant>"]


def test_tokenizer_without_template_gets_plain_text() -> None:
    assert encode_prompt(PlainTokenizer(), PROMPT) == [0, *map(ord, "s\nu")]


def test_nothing_to_encode_is_said() -> None:
    with pytest.raises(UserError, match="test:1"):
        encode_prompt(PlainTokenizer(), Prompt(0, ({"role": "user", "content": " "},), "1", "test:1"))


def test_template_that_refuses_is_said() -> None:
    class Strict(ChatTokenizer):
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
            from jinja2.exceptions import TemplateError

            raise TemplateError("system role not supported")

    with pytest.raises(UserError, match="system role not supported"):
        encode_prompt(Strict(), PROMPT)
