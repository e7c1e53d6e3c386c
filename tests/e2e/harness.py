"""A small model on disk, a copy of the sources, and the command line in a child process that leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Variables that steer a run from outside; a test names the ones it wants.
FOREIGN = ("RLK_", "RAY_", "OMP_NUM_THREADS", "PYTHONPATH", "COLUMNS", "RL_KERNEL_", "TMPDIR")


def copy_sources(folder: Path) -> Path:
    """The package in a git repository of its own, so that edits of the checkout during a run do not reach it."""
    for name in ("rl_engine", "configs"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / ".gitignore", folder)
    git = ("git", "-C", str(folder), "-c", "user.name=test", "-c", "user.email=test@example.invalid")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "copy")):
        subprocess.run([*git, *command], check=True, capture_output=True)
    return folder


def byte_tokenizer(folder: Path) -> int:
    """Writes a tokenizer of single bytes and two special tokens; returns its size. It has no chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    body = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(body))
    return tokenizer.get_vocab_size()


def save_model(folder: Path, family: str = "qwen3", **changes: object) -> Path:
    """A random two-layer model, wide enough (576) that stock operators round differently on the two sides.

    It likes to say ``5``, blanks and the end, so that the prompts of :func:`profile` earn rewards now and then.
    """
    import torch
    from tokenizers import pre_tokenizers

    from rl_engine.models.checkpoint import load_weights, save_checkpoint, save_tensors
    from rl_engine.models.weights import random_weights
    from tests.helpers import models

    folder.mkdir(parents=True)
    size = byte_tokenizer(folder)
    shape = {"layers": 2, "hidden": 576, "intermediate": 500, "heads": 9, "kv_heads": 3, "max_positions": 2048}
    shape |= {"vocabulary": size + 5, **changes}
    save_checkpoint(folder, random_weights(getattr(models, family)(**shape), seed=11))
    tensors = {name: tensor.clone() for name, tensor in load_weights(folder).export().items()}
    # A direction that every token's embedding shares survives to the head, whose liked rows answer to it.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    liked = [alphabet.index("5"), alphabet.index("\u0120"), size - 1]
    tensors["model.embed_tokens.weight"][:, 0] += 40.0
    tensors["lm_head.weight"] *= 0.4
    tensors["lm_head.weight"][:, 0] = 0.0
    tensors["lm_head.weight"][liked, 0] = torch.tensor([0.32, 0.32, 0.26], dtype=torch.bfloat16)
    save_tensors(folder, tensors)
    return folder


def profile(folder: Path, **defaults: object) -> Path:
    """A profile of the built-in stack on a CPU: two updates of 3 x 8 short samples on sums whose result is 5."""
    rows = [{"question": f"What is {n + 5} - {n}?", "answer": "5"} for n in range(40)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = {
        "schema_version": "rlkernel.repro.profile.v1",
        "name": "small",
        "stack": "builtin",
        "requirements": {"backend": "cpu"},
        "defaults": {
            "mode": "consistency",
            "rollouts": 2,
            "rollout_batch_size": 3,
            "samples_per_prompt": 8,
            "max_response_len": 20,
            "lr": 3e-4,
            "threads": 1,
            "tp_size": 1,
            "cp_size": 1,
            "rollout_tp_size": 1,
            "rollout_cp_size": 1,
            "fold_tokens": 256,
            "data_source": "jsonl",
            **defaults,
        },
        "paths": {"prompt_data": "sums.jsonl"},
    }
    path = folder / "profile.json"
    path.write_text(json.dumps(body))
    return path


@dataclasses.dataclass(frozen=True)
class Done:
    """What a command left: exit code, data, talk, and processes and temporary files that outlived it."""

    code: int
    out: str
    err: str
    strays: tuple[str, ...]


def _hears_control_c() -> None:
    """A test run in the background of a shell script inherits an ignored SIGINT, and a command keeps ignoring it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """One command line in a child process. Everything it starts inherits a mark by which it is found."""

    def __init__(self, sources: Path, arguments: list[str], cwd: Path, env: Mapping[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        # Ray's folder is made here: pytest's own folders have names too long for a socket.
        self.temporary = Path(tempfile.mkdtemp(prefix="rlk-", dir="/tmp"))
        clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        clean |= {"PYTHONPATH": str(sources), "RLK_TEST_MARK": self.mark, "TMPDIR": str(self.temporary), **env}
        self.child = subprocess.Popen(
            [sys.executable, "-m", "rl_engine.entrypoints.repro", *arguments],
            cwd=cwd,
            env=clean,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_hears_control_c,
        )

    def processes(self, title: str = "") -> dict[int, str]:
        """Living processes of this command by id, whose command line holds ``title``."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if f"RLK_TEST_MARK={self.mark}".encode() not in (entry / "environ").read_bytes():
                    continue
                text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except (OSError, IndexError):
                continue
            if state != "Z" and title in text:
                found[int(entry.name)] = text
        return found

    def wait_for(self, condition: Callable[[], bool], seconds: float = 240.0, poll: float = 0.1) -> None:
        """Until ``condition`` holds; fails when the command ends first or takes too long."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.child.poll() is None, self.child.communicate()[1]
            assert time.monotonic() < end, f"nothing happened within {seconds} s"
            time.sleep(poll)

    def press_control_c(self) -> None:
        """What a terminal does: every process of the foreground group gets the signal."""
        os.killpg(self.child.pid, signal.SIGINT)

    def finish(self, seconds: float = 600.0) -> Done:
        """Waits for the end, then up to ten seconds for whatever the command started."""
        try:
            out, err = self.child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.end()
            raise
        end = time.monotonic() + 10.0
        while self.processes() and time.monotonic() < end:
            time.sleep(0.2)
        strays = (*self.end(), *(path.name for path in self.temporary.glob("rlk-*")))
        shutil.rmtree(self.temporary)
        return Done(self.child.returncode, out, err, strays)

    def end(self) -> tuple[str, ...]:
        """Kills whatever of the command lives; what it was."""
        living = self.processes()
        for pid in living:
            os.kill(pid, signal.SIGKILL)
        return tuple(living.values())


class Cli:
    """``rlk-repro`` from ``sources``, in ``folder`` as the working directory."""

    def __init__(self, sources: Path, folder: Path, base: list[str]) -> None:
        self.sources, self.folder, self.base = sources, folder, base

    def start(self, verb: str, *arguments: str, env: Mapping[str, str] | None = None) -> Command:
        base = self.base if verb in ("run", "plan", "verify") and "--resume" not in arguments else []
        return Command(self.sources, [verb, *base, *arguments], self.folder, env or {})

    def __call__(self, verb: str, *arguments: str, env: Mapping[str, str] | None = None) -> Done:
        return self.start(verb, *arguments, env=env).finish()

    def run_dir(self, name: str) -> Path:
        return self.folder / ".rlk-workspace" / "data" / "runs" / "convergence" / name
