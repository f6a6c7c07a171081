"""How a run's processes start and end: real processes, real signals, exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain_cli.engine.launch import NodePlan, launch, worker_environment
from posttrain_cli.errors import DataError, Interrupted, PtcError, RunError, UsageError

WORKER = """
import os, signal, sys, time
from pathlib import Path
from posttrain_cli.engine.distributed import Stopper, World
from posttrain_cli.engine.worker import run_worker
from posttrain_cli.errors import DataError, Interrupted, RunError, UsageError

rank = int(os.environ["RANK"])
here = Path(__file__).parent

def until(path):
    while not path.exists():
        time.sleep(0.01)

def save_when_told(seconds=0.0):
    with Stopper() as stopper:
        (here / f"ready-{rank}").touch()
        while not (signum := stopper.agreed(World(rank, 1, rank, None, None))):
            time.sleep(0.01)
        time.sleep(seconds)
        print("saving", flush=True)
        (here / f"saved-{rank}").touch()
        raise Interrupted(signum, f"stopped at step 7, rank {rank}", "continue it")

def body():
BODY

run_worker(body)
"""

PARENT = """
import sys
from pathlib import Path
from posttrain_cli.engine.launch import launch
from posttrain_cli.errors import PtcError

here = Path(sys.argv[1]).parent
try:
    launch([sys.executable, sys.argv[1]], int(sys.argv[2]), log_dir=here / "logs", env={},
           grace=float(sys.argv[3]), fail_grace=1.0, follow=lambda line: print(line, flush=True))
except PtcError as error:
    print(error.message, error.hint, sep="\\n", flush=True)
    sys.exit(error.exit_code)
"""


def write_worker(folder: Path, body: str) -> Path:
    script = folder / "worker.py"
    script.write_text(WORKER.replace("BODY", textwrap.indent(textwrap.dedent(body), "    ")))
    return script


def run(
    folder: Path,
    body: str,
    n: int = 2,
    fail_grace: float = 5.0,
    follow: Callable[[str], None] = lambda line: None,
    node: NodePlan | None = None,
    env: dict[str, str] | None = None,
) -> int:
    return launch(
        [sys.executable, str(write_worker(folder, body))],
        n,
        log_dir=folder / "logs",
        env=env or {},
        fail_grace=fail_grace,
        follow=follow,
        node=node,
    )


def start(folder: Path, body: str, n: int = 2, grace: float = 20.0) -> subprocess.Popen[str]:
    """A launcher in a process of its own, once its workers are in their loop."""
    script = write_worker(folder, body)
    parent = folder / "parent.py"
    parent.write_text(PARENT)
    process = subprocess.Popen(
        [sys.executable, str(parent), str(script), str(n), str(grace)],
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: all((folder / f"ready-{rank}").exists() for rank in range(n)))
    return process


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and stdout of a launcher that was started."""
    out, _ = process.communicate(timeout=20)
    return process.returncode, out


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_all_done_is_zero_and_the_environment_is_fixed(tmp_path):
    env = worker_environment(7, 2)
    code = run(
        tmp_path,
        """
        import json
        names = ("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK PYTHONHASHSEED "
                 "OMP_NUM_THREADS CUBLAS_WORKSPACE_CONFIG").split()
        values = {name: os.environ[name] for name in names}
        values |= {"hash": hash("order"), "own_session": os.getsid(0) == os.getpid()}
        (here / f"env-{rank}.json").write_text(json.dumps(values))
        """,
        env=env,
    )
    assert code == 0
    seen = [json.loads((tmp_path / f"env-{rank}.json").read_text()) for rank in (0, 1)]
    assert [each.pop("RANK") for each in seen] == ["0", "1"]
    assert [each.pop("LOCAL_RANK") for each in seen] == ["0", "1"]
    assert seen[0] == seen[1]
    assert seen[0]["WORLD_SIZE"] == seen[0]["LOCAL_WORLD_SIZE"] == "2"
    assert seen[0]["PYTHONHASHSEED"] == "7"
    assert seen[0]["own_session"] is True
    assert seen[0]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_cores_are_shared_among_the_processes_unless_the_user_says(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert worker_environment(1, 1)["OMP_NUM_THREADS"] == str(cores)
    assert worker_environment(1, 10 * cores)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert worker_environment(1, 2) == {
        "PYTHONHASHSEED": "1",
        "OMP_NUM_THREADS": "3",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    }


def test_an_exit_code_is_a_run_error_with_rank_code_and_log(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("of an earlier session\n")
    began = time.monotonic()
    with pytest.raises(RunError) as caught:
        run(
            tmp_path,
            """
            if rank == 1:
                print("the last words", flush=True)
                os._exit(7)
            time.sleep(60)
            """,
            fail_grace=40.0,
        )
    assert caught.value.exit_code == 3
    assert caught.value.message == "rank 1 ended with code 7"
    assert "the last words" in caught.value.hint
    assert "earlier session" not in caught.value.hint
    assert str(tmp_path / "logs" / "rank-1.log") in caught.value.hint
    assert time.monotonic() - began < 20  # the other rank died of SIGTERM, not of patience


def test_a_killed_worker_is_named_with_its_signal(tmp_path):
    with pytest.raises(RunError, match=r"rank 1 was killed by SIGKILL, .* memory runs out"):
        run(tmp_path, "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)")


def test_a_stuck_peer_is_killed_after_the_short_grace(tmp_path):
    began = time.monotonic()
    with pytest.raises(RunError, match="rank 0 was killed by SIGSEGV"):
        run(
            tmp_path,
            """
            if rank == 0:
                until(here / "stuck")
                os.kill(os.getpid(), signal.SIGSEGV)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (here / "stuck").touch()
            time.sleep(60)
            """,
            fail_grace=0.5,
        )
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        ("DataError('no rows', 'add some')", DataError, 1),
        ("UsageError('two mistakes', 'add some', ['one', 'two'])", UsageError, 2),
        ("RunError('diverged', 'add some')", RunError, 3),
    ],
)
def test_an_explained_error_of_a_worker_is_raised_here(tmp_path, error, kind, code):
    with pytest.raises(kind) as caught:
        run(tmp_path, f"raise {error}")
    assert type(caught.value) is kind
    assert caught.value.exit_code == code
    assert caught.value.message in {"no rows", "two mistakes", "diverged"}
    assert caught.value.hint == "add some"
    assert getattr(caught.value, "problems", ()) == (("one", "two") if code == 2 else ())
    assert "Traceback" not in (tmp_path / "logs" / "rank-0.log").read_text()


def test_an_unexpected_exception_is_named_and_its_traceback_is_in_the_log(tmp_path):
    with pytest.raises(RunError) as caught:
        run(tmp_path, "raise ZeroDivisionError('by\\nzero')", n=1)
    assert caught.value.message == "rank 0 failed: ZeroDivisionError: by"
    assert "Traceback" in caught.value.hint


def test_even_an_exception_that_is_no_exception_is_reported(tmp_path):
    body = """
    class Odd(BaseException):
        pass
    raise Odd("as torch's CheckpointException")
    """
    with pytest.raises(RunError, match="rank 0 failed: Odd: as torch's CheckpointException"):
        run(tmp_path, body, n=1)


def test_the_cause_is_named_and_not_its_consequence(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain_cli.engine.launch._SETTLE", 20.0)
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        run(
            tmp_path,
            """
            until(here / "gone") if rank == 0 else (here / "gone").touch()
            if rank == 0:
                raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
            time.sleep(0.15)  # rank 0 is seen first, as when a GPU is slow to let go
            os.kill(os.getpid(), signal.SIGKILL)
            """,
        )


def test_an_explained_error_wins_over_a_peer_that_was_killed_by_it(tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain_cli.engine.launch._SETTLE", 20.0)
    with pytest.raises(DataError, match="no rows"):
        run(
            tmp_path,
            """
            until(here / "gone") if rank == 0 else (here / "gone").touch()
            if rank == 0:
                os.abort()
            time.sleep(0.15)
            raise DataError("no rows")
            """,
        )


def test_a_stop_that_the_workers_agreed_on_is_passed_on(tmp_path):
    with pytest.raises(Interrupted) as caught:
        run(
            tmp_path,
            """
            if rank == 0:
                until(here / "ready-1")
                raise Interrupted(15, "stopped at step 3", "continue it")
            save_when_told()
            """,
        )
    assert caught.value.exit_code == 143
    assert caught.value.message == "stopped at step 3"
    assert caught.value.hint == "continue it"
    assert (tmp_path / "saved-1").exists()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_forwarded_and_the_workers_save(tmp_path, signum, code):
    process = start(tmp_path, "save_when_told(0.3)")
    process.send_signal(signum)
    status, out = end(process)
    assert status == code
    assert out.splitlines() == ["saving", "stopped at step 7, rank 0", "continue it"]
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


def test_hanging_up_saves_like_sigterm(tmp_path):
    process = start(tmp_path, "save_when_told()")
    process.send_signal(signal.SIGHUP)
    assert end(process)[0] == 128 + signal.SIGHUP
    assert (tmp_path / "saved-1").exists()


def test_a_run_under_nohup_does_not_hear_the_terminal_close(tmp_path):
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start(tmp_path, "(here / 'ready-0').touch(); until(here / 'go')", n=1)
    finally:
        signal.signal(signal.SIGHUP, old)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.2)
    (tmp_path / "go").touch()
    assert end(process)[0] == 0


def test_a_run_that_is_done_before_the_stop_reaches_it_is_done(tmp_path):
    body = """
    signal.signal(signal.SIGTERM, lambda *_: (here / "go").touch())
    (here / f"ready-{rank}").touch()
    until(here / "go")
    """
    process = start(tmp_path, body)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 0


def test_a_second_ctrl_c_kills(tmp_path):
    process = start(tmp_path, "save_when_told(60)")
    process.send_signal(signal.SIGINT)
    time.sleep(0.7)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    code, out = end(process)
    assert code == 130
    assert time.monotonic() - began < 20
    assert "stopped by SIGINT and killed before it had saved" in out
    assert "ptc resume" in out
    assert not (tmp_path / "saved-0").exists()


def test_one_stop_delivered_twice_is_one(tmp_path):
    process = start(tmp_path, "save_when_told(0.3)")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)  # two different ones, as equal ones could become one
    assert end(process)[0] == 130
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()


def test_the_grace_ends(tmp_path):
    process = start(tmp_path, "save_when_told(60)", grace=0.5)
    process.send_signal(signal.SIGTERM)
    code, out = end(process)
    assert code == 143
    assert "killed before it had saved" in out


def test_a_stop_before_there_is_anything_to_save_ends_at_once(tmp_path):
    process = start(tmp_path, "(here / f'ready-{rank}').touch(); time.sleep(60)")
    process.send_signal(signal.SIGTERM)
    code, out = end(process)
    assert code == 143
    assert "stopped by SIGTERM" in out


def test_a_save_that_fails_after_the_signal_is_a_failure(tmp_path):
    body = """
    try:
        save_when_told()
    except Interrupted:
        raise RunError("no space") if rank == 1 else Interrupted(15, "saved")
    """
    process = start(tmp_path, body)
    process.send_signal(signal.SIGTERM)
    code, out = end(process)
    assert code == 3
    assert "no space" in out


def test_workers_save_and_leave_when_the_parent_is_killed(tmp_path):
    process = start(tmp_path, "(here / f'pid-{rank}').write_text(f'{os.getpid()} ' + "
                    "os.environ['PTC_SCRATCH']); save_when_told(0.2)")  # fmt: skip
    process.kill()
    end(process)
    words = [(tmp_path / f"pid-{rank}").read_text().split() for rank in (0, 1)]
    wait_for(lambda: not any(alive(int(pid)) for pid, _ in words), 10)
    assert (tmp_path / "saved-0").exists()
    assert (tmp_path / "saved-1").exists()
    assert "saving" in (tmp_path / "logs" / "rank-0.log").read_text()
    assert not Path(words[0][1]).exists()  # what the dead parent could not remove


def test_what_a_worker_started_does_not_outlive_the_run(tmp_path):
    run(
        tmp_path,
        """
        import subprocess
        child = subprocess.Popen(["sleep", "60"])
        (here / "child").write_text(str(child.pid))
        os._exit(0)
        """,
        n=1,
    )
    wait_for(lambda: not alive(int((tmp_path / "child").read_text())), 5)


def test_lines_of_this_session_are_followed_and_logs_are_kept(tmp_path):
    lines: list[str] = []
    body = "print('first'); sys.stderr.write('second\\n'); print('no newline', end='')"
    run(tmp_path, body, follow=lines.append)
    run(tmp_path, "print(f'again {rank}')", follow=lines.append)
    assert lines == ["first", "second", "no newline", "again 0"]
    assert (tmp_path / "logs" / "rank-1.log").read_text().endswith("no newlineagain 1\n")


def test_a_reader_that_went_away_does_not_stop_the_run(tmp_path):
    def broken(line: str) -> None:
        raise BrokenPipeError

    assert run(tmp_path, "print('hello')", follow=broken) == 0


def test_old_signal_handlers_come_back(tmp_path):
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run(tmp_path, "pass", n=1)
    after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == before


def test_several_machines_number_their_ranks_through(tmp_path):
    run(
        tmp_path,
        """
        names = "WORLD_SIZE LOCAL_RANK GROUP_RANK MASTER_ADDR MASTER_PORT".split()
        (here / f"rank-{rank}").write_text(" ".join(os.environ[name] for name in names))
        assert "PTC_STORE" not in os.environ
        """,
        node=NodePlan(nodes=3, rank=1, endpoint="node0:29400"),
    )
    assert (tmp_path / "rank-2").read_text() == "6 0 1 node0 29400"
    assert (tmp_path / "rank-3").read_text() == "6 1 1 node0 29400"


@pytest.mark.parametrize("endpoint", ["node0", "node0:", ":29400", "node0:x", "node0:99999"])
def test_an_endpoint_that_is_none_is_named(endpoint):
    with pytest.raises(UsageError, match=f"--rdzv-endpoint {endpoint}"):
        NodePlan(2, 0, endpoint).address()


def test_a_machine_number_out_of_range_is_named():
    with pytest.raises(UsageError, match="--node-rank 2` is not below `--nnodes 2"):
        NodePlan(2, 2, "[::1]:29400").address()
    assert NodePlan(2, 1, "[::1]:29400").address() == ("::1", "29400")


def test_every_reported_error_keeps_its_exit_code():
    from posttrain_cli.engine.worker import EXPLAINED, Report

    codes = {kind: make(Report(kind, "x")).exit_code for kind, make in EXPLAINED.items()}
    assert codes == {"DataError": 1, "UsageError": 2, "RunError": 3}
    assert all(isinstance(make(Report("", "x")), PtcError) for make in EXPLAINED.values())
