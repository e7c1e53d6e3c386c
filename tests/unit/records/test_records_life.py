"""Life cycle: one writer at a time, kills at any moment, checkpoints that are complete or absent."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_engine.records.checkpoints import latest_checkpoint, write_checkpoint
from rl_engine.records.codec import canonical_digest
from rl_engine.records.errors import UserError
from rl_engine.records.lock import is_live
from rl_engine.records.reader import RunReader
from rl_engine.records.writer import RunWriter
from tests.helpers.synthetic_run import make_run

ROOT = Path(__file__).resolve().parents[3]
KILLS = int(os.environ.get("RLK_KILLS", "5"))
CHILD = """
import dataclasses, sys
from pathlib import Path
from rl_engine.records.checkpoints import write_checkpoint
from rl_engine.records.codec import canonical_digest
from rl_engine.records.types import PassRecord
from rl_engine.records.writer import RunWriter
from tests.helpers.synthetic_run import make_batch, make_step
run = Path(sys.argv[1])
body = {"mode": "native"}
writer = RunWriter.open(run, repair=True) if run.exists() else RunWriter.create(run, body, canonical_digest(body))
if writer.current_state == "running":
    writer.state("interrupted", "killed")
writer.state("running")
while True:
    step = writer.next_step
    batch = make_batch(step)
    writer.event("started", step=step)
    writer.passes("engine", [PassRecord(step, step, 0, 1, 4, 0, 4, 0, 0, 0, (), (), (), 8, 5, "eager")])
    writer.samples(step, batch)
    writer.weights(step, {"w": f"{step:064x}"})
    writer.step(make_step(step, batch))
    print(step, flush=True)
    write_checkpoint(run, canonical_digest(body), step + 1, step + 1, lambda f: [
        (f / name).write_bytes(bytes([step % 251]) * 200_000) for name in ("master", "moments")])
    print(f"checkpoint {step + 1}", flush=True)
"""


def start(run: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(run)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_kills_lose_no_finished_step(tmp_path: Path) -> None:
    run, rng = tmp_path / "run-1", random.Random(5)
    finished, saved = -1, 0
    for attempt in range(KILLS):
        child = start(run)
        assert child.stdout is not None
        first = child.stdout.readline()
        assert first, "the child must come up"
        time.sleep(rng.random() * 0.4)
        assert is_live(run)
        os.kill(child.pid, signal.SIGKILL)
        said = [first.strip(), *child.stdout.read().split("\n")]
        child.wait()
        child.stdout.close()
        assert not is_live(run)
        finished = max([finished, *(int(line) for line in said if line.isdigit())])
        saved = max([saved, *(int(line.split()[1]) for line in said if line.startswith("checkpoint"))])
        writer = RunWriter.open(run, repair=True)
        reader = RunReader(run)
        assert writer.next_step == len(reader.steps()) >= finished + 1, attempt
        logged = {line.step for lines in reader.passes().values() for line in lines}
        assert logged >= {step.step for step in reader.steps()}
        for step in reader.steps()[-3:]:
            assert len(reader.samples(step.step).samples) == 4
        folder, manifest, passed_over = latest_checkpoint(run, canonical_digest({"mode": "native"}))
        assert manifest.next_step >= saved and passed_over == ()
        assert {path.name for path in folder.iterdir()} == {"manifest.json", "master", "moments"}
        writer.close()
    kept = [path.name for path in (run / "checkpoints").iterdir() if not path.name.startswith(".")]
    assert 1 <= len(kept) <= 3


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    body = {"mode": "native"}
    writer = RunWriter.create(tmp_path / "run", body, canonical_digest(body))
    assert is_live(tmp_path / "run")
    with pytest.raises(UserError, match="another process"):
        RunWriter.open(tmp_path / "run")
    writer.state("running")
    writer.state("failed", "out of memory")
    assert not is_live(tmp_path / "run")
    again = RunWriter.open(tmp_path / "run")
    again.state("running")
    with pytest.raises(UserError, match="another process"):
        RunWriter.open(tmp_path / "run")
    again.close()
    assert not is_live(tmp_path / "run")


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    digest = RunReader(run).plan().digest
    for step in (1, 2, 3):
        write_checkpoint(run, digest, step, step, lambda folder: (folder / "w").write_bytes(b"x" * 100) and None)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-00002", "step-00003"]
    assert latest_checkpoint(run, digest)[1].next_step == 3
    with pytest.raises(UserError, match="another plan"):
        latest_checkpoint(run, "0" * 64)
    (run / "checkpoints/step-00003/w").write_bytes(b"x" * 99 + b"y")
    folder, manifest, passed_over = latest_checkpoint(run, digest)
    assert (folder.name, manifest.next_step) == ("step-00002", 2) and "other bytes" in passed_over[0]
    (run / "checkpoints/step-00002/manifest.json").unlink()
    with pytest.raises(UserError, match="no usable checkpoint"):
        latest_checkpoint(run, digest)


def test_names_in_a_manifest_cannot_travel(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    digest = RunReader(run).plan().digest
    folder = write_checkpoint(run, digest, 1, 1, lambda inner: (inner / "w").write_bytes(b"x") and None)
    (tmp_path / "outside").write_bytes(b"x")
    text = (folder / "manifest.json").read_text().replace('"w"', '"../../../outside"')
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="missing or added"):
        latest_checkpoint(run, digest)
    (run / "checkpoints").rename(tmp_path / "moved")
    (run / "checkpoints").symlink_to(tmp_path / "moved")
    with pytest.raises(UserError):
        write_checkpoint(run, digest, 2, 2, lambda inner: None)


def test_a_failing_save_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    digest = RunReader(run).plan().digest
    write_checkpoint(run, digest, 1, 1, lambda folder: (folder / "w").write_bytes(b"x") and None)

    def full(folder: Path) -> None:
        (folder / "w").write_bytes(b"y")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_checkpoint(run, digest, 2, 2, full)
    assert os.listdir(run / "checkpoints") == ["step-00001"]
    assert latest_checkpoint(run, digest)[1].next_step == 1


def test_checks_import_no_torch() -> None:
    code = "import sys, rl_engine.checks.validate, rl_engine.checks.compare; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
