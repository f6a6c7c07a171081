"""Checkpoints: whole or absent, verified, exact, and never trusted."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from posttrain_cli.engine import checkpoint, dcp, seeds
from posttrain_cli.engine.background import BackgroundSaver
from posttrain_cli.engine.distributed import World
from posttrain_cli.engine.launch import launch
from posttrain_cli.errors import RunError, UsageError

ALONE = World(0, 1, 0, torch.device("cpu"), None)


def some_tensors(seed: int = 1) -> dict[str, torch.Tensor]:
    """Tensors of every kind a run stores: weights, moments, a step count, nothing at all."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.weight": torch.randn(13, 7, generator=generator),
        "model.half": torch.randn(5, 3, generator=generator).bfloat16(),
        "optim.weight.exp_avg": torch.randn(13, 7, generator=generator),
        "optim.weight.step": torch.tensor(3.0),
        "long": torch.tensor([2**40, -1]),
        "empty": torch.zeros(0, 4),
    }


def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def save(folder: Path, step: int, tensors: dict[str, torch.Tensor] | None = None) -> Path:
    return checkpoint.save(folder, step, tensors or some_tensors(step), {"at": step}, ALONE)


def newest(folder: Path) -> tuple[int | None, list[str]]:
    """Step of the newest whole checkpoint, and what was said about the others."""
    said: list[str] = []
    found = checkpoint.newest(folder, said.append)
    return (found.step if found else None), said


def rewrite_manifest(path: Path) -> None:
    """Make the manifest agree with the files, as somebody who means harm would."""
    manifest = json.loads((path / "MANIFEST.json").read_text())
    for name in manifest["files"]:
        content = (path / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        manifest["files"][name] = {"size": len(content), "sha256": digest}
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


def test_what_was_saved_comes_back_bit_for_bit(tmp_path):
    tensors = some_tensors()
    state = {"epoch": 2, "best": 0.1 + 0.2, "text": "zähl"}
    path = checkpoint.save(tmp_path / "checkpoints", 1000, tensors, state, ALONE)
    assert path == tmp_path / "checkpoints" / "step_00001000"
    found = checkpoint.newest(tmp_path / "checkpoints", pytest.fail)
    assert found == checkpoint.Checkpoint(path, 1000, 1, state)
    into = zeros(tensors)
    places = {name: tensor.data_ptr() for name, tensor in into.items()}
    checkpoint.load(found, into)
    assert same(into, tensors)
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == places


def test_generators_go_on_where_they_were(tmp_path):
    seeds.set_seeds(5)
    save(tmp_path, 1)
    expected = random.random(), torch.rand(3)
    seeds.set_seeds(6)
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert found is not None
    assert checkpoint.restore_rng(found, ALONE) is True
    assert random.random() == expected[0]
    assert torch.equal(torch.rand(3), expected[1])
    other = World(0, 2, 0, torch.device("cpu"), "gloo")
    assert checkpoint.restore_rng(found, other) is False


def test_the_manifest_lists_every_file_and_no_file_names_this_machine(tmp_path):
    path = save(tmp_path / "some-private-name", 7)
    manifest = json.loads((path / "MANIFEST.json").read_text())
    names = {"state.json", "rng-rank-0.json", ".metadata", "__0_0.distcp"}
    assert {each.name for each in path.iterdir()} == names | {"MANIFEST.json"}
    assert (manifest["step"], set(manifest["files"])) == (7, names)
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        assert b"some-private-name" not in content


def test_extras_are_part_of_the_checkpoint(tmp_path):
    def extras(folder: Path) -> None:
        (folder / "adapter").mkdir()
        (folder / "adapter" / "config.json").write_text("{}")

    path = checkpoint.save(tmp_path, 1, some_tensors(), {}, ALONE, extras)
    assert newest(tmp_path) == (1, [])
    (path / "adapter" / "config.json").write_text("[]")
    step, said = newest(tmp_path)
    assert step is None
    assert "`config.json` has other content" in said[0]


def test_the_highest_step_counts_not_the_latest_time(tmp_path):
    assert newest(tmp_path / "absent") == (None, [])
    for step in (100, 20, 3):
        save(tmp_path, step)
    os.utime(tmp_path / "step_00000100", (0, 0))
    (tmp_path / "step_backup").mkdir()
    (tmp_path / "step_00000999.old").mkdir()
    (tmp_path / ".tmp-step_00000200").mkdir()
    step, said = newest(tmp_path)
    assert step == 100
    assert said == [f"`{tmp_path}/.tmp-step_00000200` was never finished and is passed over"]
    assert sorted(checkpoint.steps(tmp_path)) == [3, 20, 100]


def cut(path: Path) -> None:
    shard = path / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(content)


def point_outside(path: Path) -> None:
    text = (path / "MANIFEST.json").read_text()
    (path / "MANIFEST.json").write_text(text.replace("__0_0.distcp", "../outside"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, "`__0_0.distcp` has "),
        (flip, "`__0_0.distcp` has other content than when it was written"),
        (lambda path: (path / ".metadata").unlink(), "`.metadata` is missing"),
        (lambda path: (path / "MANIFEST.json").unlink(), "`MANIFEST.json` is missing"),
        (lambda path: (path / "MANIFEST.json").write_text("{"), "cannot be read"),
        (lambda path: (path / "MANIFEST.json").write_text("[]"), "cannot be read"),
        (lambda path: (path / "MANIFEST.json").write_text('{"files": {}}'), "of step None"),
        (
            lambda path: (path / "MANIFEST.json").write_text('{"files": {}, "step": 2}'),
            "does not list its files properly: `state.json`",
        ),
        (point_outside, "does not list its files properly: `../outside`"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_passed_over(
    tmp_path, harm: Callable[[Path], None], words
):
    save(tmp_path, 1)
    harm(save(tmp_path, 2))
    step, said = newest(tmp_path)
    assert step == 1
    assert len(said) == 1
    assert said[0].startswith(f"checkpoint `{tmp_path}/step_00000002` is damaged and passed over: ")
    assert words in said[0]


def test_saving_again_replaces_a_damaged_checkpoint(tmp_path):
    cut(save(tmp_path, 2))
    save(tmp_path, 2)
    assert newest(tmp_path) == (2, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_a_checkpoint_named_by_its_user_is_verified(tmp_path):
    path = save(tmp_path, 2)
    assert checkpoint.open_checkpoint(path).step == 2
    cut(path)
    with pytest.raises(UsageError, match=f"checkpoint `{path}` is damaged: `__0_0.distcp` has"):
        checkpoint.open_checkpoint(path)


def test_a_copied_folder_is_as_good(tmp_path):
    save(tmp_path / "run", 2)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    found = checkpoint.newest(tmp_path / "copy", pytest.fail)
    assert found is not None
    into = zeros(some_tensors())
    checkpoint.load(found, into)
    assert same(into, some_tensors(2))


def test_the_newest_and_the_protected_stay(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    cut(tmp_path / "step_00000005")
    assert checkpoint.prune(tmp_path, 2, protect={1}) == [2]  # 5 is damaged and does not count
    assert sorted(checkpoint.steps(tmp_path)) == [1, 3, 4, 5]
    assert checkpoint.prune(tmp_path, 2, protect={1}) == []
    assert checkpoint.prune(tmp_path, 1) == [1, 3]
    assert newest(tmp_path)[0] == 4


def test_half_a_removal_never_looks_like_a_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)

    def killed(path: Path) -> None:
        (path / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.prune(tmp_path, 1)
    step, said = newest(tmp_path)
    assert step == 2
    assert said == [
        f"`{tmp_path}/.tmp-removed-step_00000001` was never finished and is passed over"
    ]
    save(tmp_path, 3)
    assert newest(tmp_path) == (3, [])


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from posttrain_cli.engine import checkpoint, dcp
from posttrain_cli.engine.distributed import World

folder = Path(sys.argv[1])
alone = World(0, 1, 0, torch.device("cpu"), None)
tensors = {"weight": torch.arange(1000.0)}
write, atomic_write, rename = dcp.write, checkpoint.atomic_write, Path.rename

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def half_a_shard(unfinished, tensors, world):
    write(unfinished, tensors, world)
    os.truncate(unfinished / "__0_0.distcp", 100)
    die()

def before_manifest(target, content):
    die() if target.name == "MANIFEST.json" else atomic_write(target, content)

for stage in ("half-a-shard", "before-manifest", "before-rename", "after-rename"):
    if os.fork() == 0:
        if stage == "half-a-shard":
            dcp.write = half_a_shard
        elif stage == "before-manifest":
            checkpoint.atomic_write = before_manifest
        elif stage == "before-rename":
            Path.rename = lambda *names: die()
        checkpoint.save(folder / stage, 2, tensors, {}, alone)
        die()
    _, status = os.wait()
    assert os.WTERMSIG(status) == signal.SIGKILL, (stage, status)
"""


def test_killed_at_any_moment_of_a_save_the_newest_is_whole(tmp_path):
    stages = {"half-a-shard": 1, "before-manifest": 1, "before-rename": 1, "after-rename": 2}
    for stage in stages:
        save(tmp_path / stage, 1)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    for stage, step in stages.items():
        left = [f"`{tmp_path / stage}/.tmp-step_00000002` was never finished and is passed over"]
        assert newest(tmp_path / stage) == (step, left if step == 1 else []), stage
        assert sorted(checkpoint.steps(tmp_path / stage)) == ([1] if step == 1 else [1, 2])
        save(tmp_path / stage, 2)
        assert newest(tmp_path / stage) == (2, [])
        assert sorted(each.name for each in (tmp_path / stage).iterdir()) == [
            "step_00000001",
            "step_00000002",
        ]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    tensors, finished = some_tensors(), []
    held = threading.Event()
    write = dcp.write

    def slow(*arguments: object) -> None:
        assert held.wait(20)
        write(*arguments)

    monkeypatch.setattr(dcp, "write", slow)
    saver = BackgroundSaver(ALONE)
    saver.save(tmp_path, 1, tensors, {"at": 1}, finished.append)
    for each in tensors.values():
        each.zero_()
    assert newest(tmp_path)[0] is None
    held.set()
    saver.close()
    assert finished == [tmp_path / "step_00000001"]
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert found is not None
    checkpoint.load(found, tensors)
    assert same(tensors, some_tensors())


def test_what_failed_in_the_background_is_raised_by_the_next_save(tmp_path, monkeypatch):
    saver = BackgroundSaver(ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_finish", lambda *_: (_ for _ in ()).throw(OSError("no disk")))
        saver.save(tmp_path, 1, some_tensors(), {}, pytest.fail)
        with pytest.raises(RunError, match="cannot write a checkpoint: no disk"):
            saver.save(tmp_path, 2, some_tensors(), {}, pytest.fail)
    saver.save(tmp_path, 3, some_tensors(), {}, lambda path: None)
    saver.close()
    assert newest(tmp_path) == (3, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def test_no_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage(2**40, 0, 2**20))
    with pytest.raises(RunError) as caught:
        save(tmp_path, 2, {"weight": torch.zeros(2**28)})
    assert f"`{tmp_path}` has 0.00 GiB free, a checkpoint takes 1.00 GiB" in caught.value.message
    assert "keep_checkpoints" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_write_that_fails_leaves_the_older_checkpoint(tmp_path):
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(RunError, match=r"cannot write a checkpoint: rank 0: .*") as caught:
            save(tmp_path, 2, {"weight": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "older checkpoints are untouched" in caught.value.hint
    assert newest(tmp_path) == (1, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_what_does_not_fit_is_named_all_at_once(tmp_path):
    save(tmp_path, 1)
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert found is not None
    into = zeros(some_tensors())
    into["model.weight"] = torch.zeros(13, 8)
    into["model.half"] = torch.zeros(5, 3)
    into["added"] = torch.zeros(1)
    del into["long"]
    with pytest.raises(UsageError) as caught:
        checkpoint.load(found, into)
    assert f"`{found.path}` does not fit" in caught.value.message
    there, here = "torch.float32 in the checkpoint", "torch.float32 in this run"
    assert set(caught.value.problems) == {
        f"`model.weight` is (13, 7) {there} and (13, 8) {here}",
        f"`model.half` is (5, 3) torch.bfloat16 in the checkpoint and (5, 3) {here}",
        "`added` is not in the checkpoint",
        "`long` is in the checkpoint and not in this run",
    }
    assert not into["optim.weight.exp_avg"].any()


def test_part_of_a_checkpoint_can_be_loaded_on_purpose(tmp_path):
    save(tmp_path, 1)
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert found is not None
    into = {"model.weight": torch.zeros(13, 7)}
    checkpoint.load(found, into, partial=True)
    assert torch.equal(into["model.weight"], some_tensors()["model.weight"])
    assert dcp.shapes(dcp.read_index(found.path))["long"] == (torch.Size([2]), torch.int64)


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def outside(path: Path) -> object:
    metadata = dcp.read_index(path)
    for place in metadata.storage_data.values():
        place.relative_path = "../elsewhere"
    return metadata


def objects(path: Path) -> object:
    metadata = dcp.read_index(path)
    metadata.state_dict_metadata["object"] = BytesStorageMetadata()
    return metadata


def transformed(path: Path) -> object:
    metadata = dcp.read_index(path)
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zip"]
    return metadata


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda path: Evil(path / "ran"), "`posix.system`"),
        (lambda path: {"a": torch.Size([1])}, "no checkpoint index"),
        (outside, "`../elsewhere`"),
        (objects, "BytesStorageMetadata"),
        (transformed, "transformed"),
        (lambda path: torch.nn.Linear(1, 1), "`torch.nn.modules.linear.Linear`"),
    ],
)
def test_an_index_that_is_more_than_an_index_is_refused(tmp_path, content, words):
    path = save(tmp_path, 1)
    (path / ".metadata").write_bytes(pickle.dumps(content(path)))
    rewrite_manifest(path)
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert found is not None
    with pytest.raises(UsageError, match="cannot be trusted") as caught:
        checkpoint.load(found, zeros(some_tensors()))
    assert words in caught.value.message
    assert not (path / "ran").exists()


def test_a_cut_index_is_refused(tmp_path):
    path = save(tmp_path, 1)
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-20])
    with pytest.raises(UsageError, match="cannot be trusted"):
        dcp.read_index(path)


def test_a_shard_that_is_a_program_is_not_run(tmp_path):
    path = save(tmp_path, 1, {"weight": torch.zeros(3)})
    torch.save({"weight": Evil(tmp_path / "ran")}, path / "__0_0.distcp")
    metadata = dcp.read_index(path)
    for place in metadata.storage_data.values():
        place.length = (path / "__0_0.distcp").stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    rewrite_manifest(path)
    found = checkpoint.newest(tmp_path, pytest.fail)
    assert found is not None
    with pytest.raises(RunError, match=f"cannot read checkpoint `{path}`"):
        checkpoint.load(found, {"weight": torch.zeros(3)})
    assert not (tmp_path / "ran").exists()


TWO = """
import errno, sys
from pathlib import Path
import torch
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from posttrain_cli.engine import checkpoint, distributed, seeds
from posttrain_cli.engine.background import BackgroundSaver
from posttrain_cli.engine.worker import run_worker
from posttrain_cli.errors import RunError

mode, folder = sys.argv[1], Path(sys.argv[2])

def sharded(world, seed, empty=False):
    mesh = init_device_mesh("cpu", (world.size,))
    generator = torch.Generator().manual_seed(seed)
    full = {"weight": torch.randn(13, 7, generator=generator),
            "moment": torch.randn(1, 9, generator=generator)}
    if empty:
        full = {name: torch.zeros_like(each) for name, each in full.items()}
    tensors = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in full.items()}
    return tensors | {"step": torch.tensor(0.0 if empty else 3.0)}

def fails(world, words):
    try:
        checkpoint.save(folder, 5, sharded(world, 5), {}, world)
    except RunError as error:
        assert words in error.message, error.message
    else:
        raise AssertionError("it was saved")

def body():
    world = distributed.join(gpu=False)
    if mode == "save":
        checkpoint.save(folder, 3, sharded(world, 3), {"at": 3}, world)
        found = checkpoint.newest(folder, print)
        assert checkpoint.restore_rng(found, world)
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")
        create_stream = FileSystem.create_stream
        if world.rank == 1:
            FileSystem.create_stream = full
        fails(world, "cannot write a checkpoint: rank 1: OSError: [Errno 28] No space left")
        FileSystem.create_stream = create_stream
        if world.rank == 1:
            seeds.rng_state = full
        fails(world, "No space left on device")
    elif mode == "background":
        saver, tensors, removed = BackgroundSaver(world), sharded(world, 6), []
        for step in (6, 7):
            saver.save(folder, step, tensors, {}, lambda path: removed.append(path.name))
            for _ in range(20):  # training goes on, with collectives of its own
                for each in tensors.values():
                    each.mul_(0.5)
                assert distributed.sums(world, [1.0]) == [2.0]
        saver.close()
        assert removed == ["step_00000006", "step_00000007"]
        steps = [each.step for each in distributed.gather(world, checkpoint.newest(folder, print))]
        assert steps == [7, 7]
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")
        if world.rank == 1:
            checkpoint.sha256_file = full
        saver = BackgroundSaver(world)
        saver.save(folder, 8, tensors, {}, print)
        try:
            saver.close()
        except RunError as error:
            assert "No space left" in error.message and "untouched" in error.hint
        else:
            raise AssertionError("it was saved")
    else:
        found = checkpoint.newest(folder, print, world)
        assert (found.step, found.world) == (4, 1)
        assert not checkpoint.restore_rng(found, world)
        into, wanted = sharded(world, 4, empty=True), sharded(world, 4)
        checkpoint.load(found, into)
        for name in ("weight", "moment"):
            assert torch.equal(into[name].full_tensor(), wanted[name].full_tensor()), name
        assert into["step"] == 3.0
    distributed.shutdown()

run_worker(body)
"""


def run_two(folder: Path, mode: str) -> None:
    script = folder / "two.py"
    script.write_text(TWO)
    launch(
        [sys.executable, str(script), mode, str(folder / "checkpoints")],
        2,
        log_dir=folder / "logs",
        env={"OMP_NUM_THREADS": "1"},
        follow=lambda line: None,
    )


def test_two_processes_save_in_the_background(tmp_path):
    run_two(tmp_path, "background")
    assert newest(tmp_path / "checkpoints") == (7, [])
    found = checkpoint.open_checkpoint(tmp_path / "checkpoints" / "step_00000006")
    into = zeros(full_tensors(6))
    checkpoint.load(found, into)
    assert same(into, full_tensors(6))  # as they were when saving began


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(13, 7, generator=generator),
        "moment": torch.randn(1, 9, generator=generator),
        "step": torch.tensor(3.0),
    }


def test_two_processes_save_and_one_loads_and_the_other_way_round(tmp_path):
    folder = tmp_path / "checkpoints"
    run_two(tmp_path, "save")
    said: list[str] = []
    found = checkpoint.newest(folder, said.append)
    assert found is not None
    assert (found.step, found.world, found.state) == (3, 2, {"at": 3})
    assert said == []  # the failed saves of step 5 have left nothing
    manifest = json.loads((found.path / "MANIFEST.json").read_text())
    assert {"__0_0.distcp", "__1_0.distcp", "rng-rank-0.json", "rng-rank-1.json"} < set(
        manifest["files"]
    )
    into = zeros(full_tensors(3))
    checkpoint.load(found, into)
    assert same(into, full_tensors(3))
    save(folder, 4, full_tensors(4))
    run_two(tmp_path, "load")
