"""Files and folders where everyone may write: what another user planted is refused or left as it is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_engine.data import demo_model
from rl_engine.ops import library
from rl_engine.orchestrators import scratch
from rl_engine.prepare.download import _copy
from rl_engine.qualify.shared import shared
from rl_engine.records.codec import canonical_digest
from rl_engine.records.errors import UserError
from rl_engine.records.files import write_atomic
from rl_engine.records.private import check_place, make_folder, open_own
from rl_engine.records.writer import RunWriter
from tests.helpers.synthetic_run import make_run

ROOT = Path(__file__).resolve().parents[3]
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture
def everyones(tmp_path: Path) -> Path:
    """A folder like ``/tmp``."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file of this user that nothing may change."""
    path = tmp_path / "precious"
    path.write_text("precious")
    yield path
    assert path.read_text() == "precious"


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def opened(path: Path, how: str = "w") -> None:
    with open(path, how, opener=open_own) as file:
        file.write("ours")


@pytest.mark.parametrize("how", ["w", "a", "x"])
def test_nothing_is_written_through_a_link(everyones: Path, precious: Path, how: str) -> None:
    (everyones / "soft").symlink_to(precious)
    os.link(precious, everyones / "hard")
    for name in ("soft", "hard"):
        with pytest.raises((UserError, FileExistsError)):
            opened(everyones / name, how)


def test_a_file_of_ours_is_private(everyones: Path) -> None:
    for _ in range(2):
        opened(everyones / "file")
    assert (everyones / "file").read_text() == "ours" and mode(everyones / "file") == 0o600


def test_a_pipe_is_no_file(everyones: Path) -> None:
    os.mkfifo(everyones / "pipe")
    with pytest.raises(UserError, match="no plain file"):
        opened(everyones / "pipe")


@as_root
def test_another_users_file_and_folder_are_refused(everyones: Path) -> None:
    (everyones / "file").write_text("theirs")
    (everyones / "folder").mkdir(0o777)
    for name in ("file", "folder"):
        os.chown(everyones / name, NOBODY, NOBODY)
    with pytest.raises(UserError, match="no plain file"):
        opened(everyones / "file")
    assert (everyones / "file").read_text() == "theirs"
    with pytest.raises(UserError, match="of user 65534, in a folder where everyone may write"):
        make_folder(everyones / "folder")
    with pytest.raises(UserError, match="where everyone may write"):
        check_place(everyones / "folder" / "deep" / "run")
    body = {"mode": "native"}
    with pytest.raises(UserError, match="where everyone may write"):
        RunWriter.create(everyones / "folder" / "runs" / "r", body, canonical_digest(body))
    with pytest.raises(UserError, match="where everyone may write"):
        demo_model.ensure(everyones / "folder" / "model", print)
    assert list((everyones / "folder").iterdir()) == []
    check_place(everyones / "not" / "there")


def test_a_folder_is_no_link(everyones: Path, tmp_path: Path) -> None:
    (everyones / "link").symlink_to(tmp_path)
    with pytest.raises(UserError, match="no folder of this user"):
        make_folder(everyones / "link")
    assert mode(make_folder(everyones / "new")) == 0o700 == mode(make_folder(everyones / "new"))


def test_a_run_directory_is_its_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        run = make_run(tmp_path / "runs" / "run-1")
    finally:
        os.umask(old)
    assert mode(run) == 0o700
    assert {mode(path) for path in run.rglob("*") if path.is_file()} == {0o600}


# -- who else writes at a name that can be guessed


def proof(everyones: Path, precious: Path) -> None:
    """The first hit was here: a proof's temporary file in Ray's folder, as a link to a file of root's."""
    shared(everyones, {"model": 1}, list)
    (name,) = (path.name for path in everyones.glob("proof-*.json"))
    (everyones / name).unlink()
    for planted in (name, f"{name.removesuffix('.json')}.tmp", f".{name}.partial"):
        (everyones / planted).symlink_to(precious)
    assert shared(everyones, {"model": 1}, lambda: [{"by": "us"}]) == [{"by": "us"}]


def lock_of_a_proof(everyones: Path, precious: Path) -> None:
    shared(everyones, {"model": 1}, list)
    (lock,) = everyones.glob("proof-*.lock")
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(UserError, match="no plain file"):
        shared(everyones, {"model": 1}, list)


def lock_of_the_demo_model(everyones: Path, precious: Path) -> None:
    (everyones / ".model.lock").symlink_to(precious)
    with pytest.raises(UserError, match="no plain file"):
        demo_model.ensure(everyones / "model", print)


def download(everyones: Path, precious: Path) -> None:
    (everyones / "file.partial").symlink_to(precious)
    with pytest.raises(UserError, match="no plain file"):
        _copy(None, everyones / "file.partial", "wb", 0, None, print)  # type: ignore[arg-type]


def record(everyones: Path, precious: Path) -> None:
    (everyones / ".pair-x.json.partial").symlink_to(precious)
    write_atomic(everyones / "pair-x.json", b"ours")
    assert mode(everyones / "pair-x.json") == 0o600


@pytest.mark.parametrize("attack", [proof, lock_of_a_proof, lock_of_the_demo_model, download, record])
def test_planted_links(everyones: Path, precious: Path, attack: Callable[[Path, Path], None]) -> None:
    attack(everyones, precious)


def test_compiled_kernels_that_everyone_may_replace_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "ops" / "_build"
    beside.mkdir(parents=True)
    (tmp_path / "ops" / "library.py").touch()
    monkeypatch.setattr(library, "__file__", str(tmp_path / "ops" / "library.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert library.cache_folder() == beside
    beside.chmod(0o1777)
    assert library.cache_folder() == tmp_path / "cache" / "rl-kernel"
    (tmp_path / "cache" / "rl-kernel").chmod(0o777)
    with pytest.raises(library.BuildError, match="written by everyone"):
        library.cache_folder()


# -- the folder beside a run


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one place for such folders."""
    monkeypatch.setattr(scratch, "_bases", lambda: [str(tmp_path)])
    monkeypatch.setattr(scratch, "LONGEST_BASE", 1000)
    return tmp_path


HOLDER = """
import sys, time
from rl_engine.orchestrators import scratch
scratch._bases, scratch.LONGEST_BASE = lambda: [sys.argv[1]], 1000
print(scratch.Scratch().root if len(sys.argv) < 3 else scratch.sweep(), flush=True)
time.sleep(60 if len(sys.argv) < 3 else 0)
"""


def holder(base: Path, *words: str, user: int | None = None) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLDER, str(base), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, user=user)


def test_a_living_runs_folder_stays_and_a_dead_ones_goes(base: Path) -> None:
    child = holder(base)
    assert child.stdout is not None
    root = Path(child.stdout.readline().strip())
    assert (mode(root), mode(root / "p")) == (0o700, 0o700)
    assert scratch.sweep() == [] and root.exists()
    child.kill()
    child.wait()
    (root / "r").mkdir()
    (root / "r" / "socket").touch()
    assert scratch.sweep() == [str(root)] and not root.exists()
    child.stdout.close()


def test_what_a_dead_run_started_ends(base: Path) -> None:
    folder = scratch.Scratch()
    mark = f"{scratch.MARK}={folder.root}"
    children = [
        subprocess.Popen(["sleep", "60"], env=dict([word.split("=", 1)])) for word in (mark, mark + "x", "A=" + mark)
    ]
    try:
        assert folder._lock is not None
        os.close(folder._lock)
        folder._lock = None
        assert scratch.sweep() == [str(folder.root)]
        assert children[0].wait(10) == -9
        assert [child.poll() for child in children[1:]] == [None, None]
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_sweep_takes_nothing_but_folders_of_runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "file").touch()
    (base / f"{scratch.PREFIX}link").symlink_to(other)
    (base / f"{scratch.PREFIX}file").touch()
    (base / "rlk-ray-old").mkdir()
    if os.geteuid() == 0:
        (base / f"{scratch.PREFIX}theirs").mkdir()
        os.chown(base / f"{scratch.PREFIX}theirs", NOBODY, NOBODY)
    before = sorted(base.iterdir())
    assert scratch.sweep() == [] and sorted(base.iterdir()) == before and (other / "file").exists()


def test_a_folder_that_a_sweep_takes_while_it_is_made_is_made_again(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = [], scratch.tempfile.mkdtemp

    def mkdtemp(**words: str) -> str:
        made.append(real(**words))
        if len(made) == 1:
            assert scratch.sweep() == made
        return made[-1]

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", mkdtemp)
    folder = scratch.Scratch()
    assert len(made) == 2 and folder.root == Path(made[1])
    folder.remove()
    assert not folder.root.exists()


def test_without_locks_folders_are_made_and_never_swept(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(scratch.fcntl, "flock", no_locks)
    folder = scratch.Scratch()
    assert scratch.sweep() == [] and folder.own.is_dir()
    folder.remove()
    assert not folder.root.exists()
