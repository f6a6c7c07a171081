"""The lock of a run directory: held while any process of the run lives, and no longer."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain_cli.errors import UsageError
from posttrain_cli.runs.lock import run_lock

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from posttrain_cli.runs.lock import run_lock
with run_lock(Path(sys.argv[1]), print):
    worker = subprocess.Popen(["sleep", sys.argv[2]], close_fds=False)
    print(worker.pid, flush=True)
    time.sleep(60)
"""


def hold(path: Path, seconds: float) -> tuple[subprocess.Popen[str], int]:
    """A process that holds the lock, and the worker it has started."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder.stdout:
        return holder, int(holder.stdout.readline())


def test_a_directory_in_use_is_refused_and_its_user_named(tmp_path):
    holder, worker = hold(tmp_path, 60)
    said: list[str] = []
    try:
        began = time.monotonic()
        with (
            pytest.raises(UsageError) as caught,
            run_lock(tmp_path, said.append, wait=0.3),
        ):
            pytest.fail("it was locked twice")
        assert 0.3 <= time.monotonic() - began < 5
        assert f"`{tmp_path}` is in use by " in caught.value.message
        assert f"process {holder.pid} (" in caught.value.message
        assert f"process {worker} (sleep 60)" in caught.value.message
        assert caught.value.exit_code == 2
        assert len(said) == 1
        assert said[0].startswith("waiting for process ")
    finally:
        holder.kill()
        holder.wait()
        os.kill(worker, 9)


def test_it_is_waited_for_workers_that_outlive_their_parent(tmp_path):
    holder, worker = hold(tmp_path, 1)
    holder.kill()
    holder.wait()
    said: list[str] = []
    with run_lock(tmp_path, said.append, wait=20):
        stat = Path(f"/proc/{worker}/stat")
        assert not stat.exists() or stat.read_text().split()[2] == "Z"
    assert said == [f"waiting for process {worker} (sleep 1) to leave `{tmp_path}`"]


def test_death_releases_it_and_leaves_nothing_to_remove(tmp_path):
    holder, worker = hold(tmp_path, 60)
    os.kill(worker, 9)
    holder.kill()
    holder.wait()
    with run_lock(tmp_path, lambda line: None, wait=20):  # dying takes a moment
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


def test_it_can_be_taken_again_and_is_released_on_errors(tmp_path):
    with pytest.raises(ValueError, match="oops"), run_lock(tmp_path, pytest.fail):
        raise ValueError("oops")
    with run_lock(tmp_path, pytest.fail, wait=0):
        pass
    with run_lock(tmp_path, pytest.fail, wait=0):
        pass


def test_a_copy_is_free_and_a_moved_run_is_still_held(tmp_path):
    run = tmp_path / "run"
    with run_lock(run, pytest.fail):
        shutil.copytree(run, tmp_path / "copy")
        run.rename(tmp_path / "moved")
        with run_lock(tmp_path / "copy", pytest.fail, wait=0):
            pass
        with (
            pytest.raises(UsageError, match="is in use"),
            run_lock(tmp_path / "moved", lambda line: None, wait=0),
        ):
            pytest.fail("it was locked twice")


def test_a_directory_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "run"
    with pytest.raises(UsageError) as caught, run_lock(path, pytest.fail):
        pytest.fail("there is no such directory")
    assert caught.value.message == (f"`{path}` cannot be used as a run directory: Not a directory")
    assert "--output-dir" in caught.value.hint


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    said: list[str] = []
    with run_lock(tmp_path, said.append):
        pass
    assert said == [f"the file system of `{tmp_path}` has no locks: do not start a run there twice"]
