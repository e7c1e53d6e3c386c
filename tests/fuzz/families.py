"""What is attacked: each family makes one spoilt input from a seed and lets the program read it."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from rl_engine.checks import compare, validate
from rl_engine.checks.seal import verify_seal
from rl_engine.config.codec import plan_from_json, plan_to_json
from rl_engine.config.document import plan_document, plan_text
from rl_engine.config.host import HostFacts
from rl_engine.config.paths import REPOSITORY
from rl_engine.config.resolve import Request, resolve
from rl_engine.data.jsonl import JsonlPrompts
from rl_engine.engines.train.state import StateMismatch, load_state, save_state
from rl_engine.models.checkpoint import load_weights, save_checkpoint
from rl_engine.models.config import UnsupportedModel
from rl_engine.models.weights import WeightMismatch, random_weights
from rl_engine.orchestrators import resume
from rl_engine.records.checkpoints import latest_checkpoint, write_checkpoint
from rl_engine.records.codec import canonical_digest
from rl_engine.records.errors import UserError
from rl_engine.records.pair import pair_record
from rl_engine.records.reader import RunReader
from rl_engine.records.samples import decode_samples
from tests.fuzz.mutate import dump, spoil_bytes, spoil_document, spoil_json
from tests.helpers.models import llama, train_engine
from tests.helpers.synthetic_run import make_plan, make_run

Files = dict[str, bytes]


class Family(Protocol):
    """Raises anything but a refusal where the program does not stand one input; False: refused, True: used."""

    def __call__(self, rng: random.Random, folder: Path) -> bool: ...


def files_of(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def put(folder: Path, files: Files) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def attempt(act: Callable[[], object], *refusals: type[Exception]) -> bool:
    """Whether ``act`` went through; a refusal must be one printable line of bearable length."""
    try:
        act()
        return True
    except (UserError, *refusals) as error:
        text = str(error)
        assert len(text) < 6000, f"{len(text)} characters of refusal"
        assert text.isprintable() or not isinstance(error, UserError), text
        return False


class Profiles:
    """Profiles, resolved to plans and shown."""

    def __init__(self, folder: Path) -> None:
        self.bodies = [path.read_bytes() for path in sorted((REPOSITORY / "configs").rglob("*.json"))]

    def __call__(self, rng: random.Random, folder: Path) -> bool:
        (folder / "profile.json").write_bytes(spoil_document(rng, rng.choice(self.bodies)))
        request = Request(
            verb=rng.choice(("plan", "run", "verify")),
            flags={},
            path_flags={"workspace": str(folder)},
            profile=str(folder / "profile.json"),
            env={},
            cwd=folder,
            host=HostFacts(2, None, True),
            now=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        )

        def act() -> None:
            resolved = resolve(request)
            json.dumps(plan_document(resolved), allow_nan=False)
            plan_text(resolved)
            for item in resolved:
                assert plan_from_json(plan_to_json(item.plan)) == item.plan

        return attempt(act)


class Prompts:
    """Prompt files in both spellings."""

    def __init__(self, folder: Path) -> None:
        rows = [{"question": f"What is {n} + 1?", "answer": f"so\n#### {n + 1}"} for n in range(6)]
        turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "½ 你好"}]
        rows += [{"prompt": turns, "label": "2", "data_source": "d"}, {"prompt": "plain", "label": "\\frac12"}]
        self.good = b"".join(dump(row) + b"\n" for row in rows)

    def __call__(self, rng: random.Random, folder: Path) -> bool:
        path = folder / "p.jsonl"
        path.write_bytes(spoil_document(rng, self.good, lines=True))

        def act() -> None:
            source = JsonlPrompts(path, rng.randrange(2**40))
            for prompt in source.batch(rng.randrange(1000), 5):
                assert prompt.messages and prompt.answer

        return attempt(act)


class Checkpoints:
    """Model checkpoints: config.json, one safetensors file or shards with an index."""

    def __init__(self, folder: Path) -> None:
        shape = llama(layers=1, hidden=64, intermediate=64, heads=2, kv_heads=2, head_dim=32, vocabulary=96)
        self.kinds = []
        for name, size in (("one", 1 << 30), ("many", 20_000)):
            (folder / name).mkdir()
            save_checkpoint(folder / name, random_weights(shape, 1), max_shard_bytes=size)
            self.kinds.append(files_of(folder / name))

    def __call__(self, rng: random.Random, folder: Path) -> bool:
        files = dict(rng.choice(self.kinds))
        name = rng.choice(sorted(files))
        if name.endswith(".json"):
            files[name] = spoil_document(rng, files[name])
        elif rng.random() < 0.5:
            files[name] = spoil_header(rng, files[name])
        else:
            files[name] = spoil_bytes(rng, files[name])
        put(folder, files)
        return attempt(lambda: load_weights(folder), WeightMismatch, UnsupportedModel)


def spoil_header(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file whose header is valid JSON with a hostile value, and has its right length."""
    size = int.from_bytes(data[:8], "little")
    header = dump(spoil_json(rng, json.loads(data[8 : 8 + size])))
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


class States:
    """Saved trainer states and their manifests."""

    def __init__(self, folder: Path) -> None:
        shape = llama(layers=1, hidden=64, intermediate=64, heads=2, kv_heads=2, head_dim=32, vocabulary=96)
        self.engine = train_engine(random_weights(shape, 1))
        run = make_run(folder / "r")
        self.digest = RunReader(run).plan().digest
        for step in (1, 2):
            write_checkpoint(run, self.digest, step, step, lambda inner: save_state(self.engine, inner))
        self.files = {name: data for name, data in files_of(run).items() if name.startswith("checkpoints/")}

    def __call__(self, rng: random.Random, folder: Path) -> bool:
        files = dict(self.files)
        name = rng.choice(sorted(files))
        tensors = name.endswith("safetensors")
        if not tensors:
            files[name] = spoil_document(rng, files[name])
        else:
            files[name] = spoil_header(rng, files[name]) if rng.random() < 0.5 else spoil_bytes(rng, files[name])
        put(folder, files)
        read = attempt(lambda: load_state(self.engine, (folder / name).parent), StateMismatch) if tensors else True
        return attempt(lambda: latest_checkpoint(folder, self.digest)) and read


class Samples:
    """The files of one step's samples."""

    def __init__(self, folder: Path) -> None:
        run = make_run(folder / "r")
        self.tensors = (run / "samples/step-00001.safetensors").read_bytes()
        self.lines = (run / "samples/step-00001.jsonl").read_bytes()

    def __call__(self, rng: random.Random, folder: Path) -> bool:
        tensors, lines, kind = self.tensors, self.lines, rng.randrange(3)
        if kind == 0:
            lines = spoil_document(rng, lines, lines=True)
        else:
            tensors = spoil_header(rng, tensors) if kind == 1 else spoil_bytes(rng, tensors)
        return attempt(lambda: decode_samples(1, tensors, lines, "samples"))


class Plans:
    """plan.json: alone, and in a directory that somebody tries to go on with."""

    def __init__(self, folder: Path) -> None:
        self.good = plan_to_json(make_plan(Path("r"))).encode()
        self.run = files_of(make_run(folder / "r"))

    def __call__(self, rng: random.Random, folder: Path) -> bool:
        text = spoil_document(rng, self.good)
        used = attempt(lambda: plan_from_json(text.decode("utf-8", "surrogateescape")))
        body = spoil_json(rng, json.loads(self.run["plan.json"])["plan"])
        stored = dump({"digest": canonical_digest(body), "plan": body})
        put(folder / "r", {**self.run, "plan.json": stored if rng.random() < 0.5 else text})

        def act() -> None:
            resume.check_resumable(resume.find(str(folder / "r"), folder))

        attempt(act)
        return used


class RunDirectories:
    """Run directories, sealed or not, through every verb that opens one."""

    def __init__(self, folder: Path) -> None:
        self.kinds = []
        for name, killed, seal in (("plain", 0, False), ("resumed", 1, False), ("sealed", 0, True)):
            run = make_run(folder / name, killed_after=killed)
            with contextlib.redirect_stdout(io.StringIO()):
                assert validate.main(run, seal=seal) == 0
            self.kinds.append(files_of(run))

    def __call__(self, rng: random.Random, folder: Path) -> bool:
        files, run = dict(rng.choice(self.kinds)), folder / "r"
        for _ in range(rng.choice((1, 1, 1, 2))):
            self._spoil(rng, files)
        put(run, files)
        before = files_of(folder)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            used = [
                attempt(lambda: validate.main(run)),
                attempt(lambda: compare.compare_runs(run, run)),
                attempt(lambda: pair_record("p", run, run)) or True,  # one directory is no pair
                attempt(lambda: verify_seal(run, "0" * 64)),
                attempt(lambda: RunReader(run).log_tail()),
                attempt(lambda: resume.find(str(run), folder)) or True,  # these were made elsewhere
            ]
        assert all(line.isprintable() and len(line) < 6000 for line in out.getvalue().splitlines())
        after = files_of(folder)
        for name, data in before.items():
            grows = name.endswith("jsonl") and (name.count("/") == 1 or name.startswith("r/passes/"))
            whole = data[: data.rfind(b"\n") + 1] if grows else data
            assert after[name].startswith(whole) if grows else after[name] == data, f"{name} was changed"
        return all(used)

    def _spoil(self, rng: random.Random, files: Files) -> None:
        name = rng.choice(sorted(files))
        kind = rng.random()
        if kind < 0.05:
            del files[name]
        elif kind < 0.1:
            files[rng.choice(("samples/x", "routes/../x", "weights/9.json", "x\n", "events.jsonl/x"))[:60]] = b"x"
            files.pop("events.jsonl", None)
        elif name.endswith(("json", "jsonl")) or name == "COMPLETE":
            files[name] = spoil_document(rng, files[name], lines=name.endswith("jsonl"))
        else:
            files[name] = spoil_bytes(rng, files[name])


FAMILIES: dict[str, type] = {
    "profiles": Profiles,
    "prompts": Prompts,
    "model checkpoints": Checkpoints,
    "trainer states": States,
    "sample files": Samples,
    "plan files": Plans,
    "run directories": RunDirectories,
}


def clear(folder: Path) -> None:
    for entry in os.scandir(folder):
        shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)


torch.set_num_threads(1)
