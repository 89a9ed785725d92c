"""Megatron's own training loop, with and without us: losses, options, what it starts and deletes.

The runs are made once, when the first test asks for one. They need `megatron.training`, which the
wheels of megatron-core have from 0.17 on: of this environment, or of the folder that the variable
MEGATRON_TRAINING_SITE names.
"""

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import megatron_uring
from megatron_uring.megatron import training

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(FOLDER.parent / "mpi"))

import launch  # noqa: E402 - found through the line above

RUN = ("-m", "megatron_uring", "run", "--option", "slab_bytes=1048576", "--option", "slab_count=4")
KEEP_2 = ["--save-interval", "1", "--save-retain-interval", "2"]
TP_2 = ["--tensor-model-parallel-size", "2", "--dist-ckpt-optim-fully-reshardable"]


def find_site():
    """Folder that has megatron/training."""
    spec = importlib.util.find_spec("megatron")
    own = list(spec.submodule_search_locations or []) if spec is not None else []
    given = os.environ.get("MEGATRON_TRAINING_SITE", "")
    for place in [*map(Path, own), Path(given) / "megatron"]:
        if (place / "training" / "training.py").exists():
            return place.parent
    return None


SITE = find_site()


@dataclass(frozen=True)
class Ended:
    """What a run left behind."""

    folder: Path
    size: int

    @property
    def checkpoints(self):
        return self.folder / "checkpoints"

    def statuses(self):
        return json.loads((self.folder / "statuses.json").read_text())

    def output(self, rank=0):
        return (self.folder / f"output-{rank}.txt").read_text(errors="replace")

    def losses(self, first=1):
        """Iteration and loss of each micro batch from iteration `first` on, of each rank."""
        found = []
        for rank in range(self.size):
            text = (self.folder / f"losses-{rank}.txt").read_text()
            lines = [line.split() for line in text.splitlines()]
            found.append([(int(number), loss) for number, loss in lines if int(number) >= first])
        return found

    def facts(self):
        paths = [self.folder / f"facts-{rank}.json" for rank in range(self.size)]
        return [json.loads(path.read_text()) for path in paths]

    def iterations(self, below="."):
        return sorted(path.name for path in (self.checkpoints / below).glob("iter_*"))

    def tracker(self, below="."):
        return (self.checkpoints / below / "latest_checkpointed_iteration.txt").read_text()


def start(root, name, launcher, *arguments):
    """A run under a launcher, by ``megatron-uring run``."""
    done = Ended(root / name, 2)
    done.folder.mkdir()
    finished = launcher(
        2,
        *RUN,
        str(FOLDER / "pretrain.py"),
        *("--records", str(done.folder), "--save", str(done.checkpoints), *arguments),
        env={"PYTHONPATH": f"{SITE}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        timeout_s=90.0,
        ok=False,
    )
    (done.folder / "output-0.txt").write_text(finished.output)
    (done.folder / "statuses.json").write_text(json.dumps([finished.status]))
    return done


@functools.cache
def all_runs(root):
    """Every run, by name."""
    begun = start(
        root,
        "begun",
        launch.run_torchrun,
        *(*KEEP_2, "--exit-interval", "2", "--async-save", "--ckpt-assume-constant-structure"),
        "--verify-integrity",
    )
    ours, plain = str(begun.checkpoints), str(root / "plain" / "checkpoints")
    tp_ours, converted = str(root / "tp-ours" / "checkpoints"), str(root / "to-torch" / "own")
    runs = []

    def add(name, size, adapter, *arguments, undo=False):
        own = ["--save", str(root / name / "checkpoints")] if "--save-interval" in arguments else []
        run = {"name": name, "size": size, "adapter": adapter, "undo": undo}
        runs.append({**run, "arguments": [*own, *arguments]})

    add("plain", 2, False, "--save-interval", "2")
    add("crossed", 2, True, "--save-interval", "8", "--non-persistent-ckpt-type", "global")
    runs[-1]["arguments"] += ["--load", plain, "--ckpt-step", "2", "--no-ckpt-fully-parallel-save"]
    runs[-1]["arguments"] += ["--non-persistent-save-interval", "1", "--train-iters", "6"]
    runs[-1]["arguments"] += ["--use-checkpoint-opt-param-scheduler"]
    add("refused", 1, False, "--load", ours)
    add("to-torch", 2, True, "--load", ours)
    runs[-1]["arguments"] += ["--ckpt-convert-format", "torch", "--ckpt-convert-save", converted]
    add("from-torch", 2, True, "--load", f"{converted}/torch", "--ckpt-format", "torch")
    runs[-1]["arguments"] += ["--ckpt-convert-format", "torch_dist"]
    runs[-1]["arguments"] += ["--ckpt-convert-save", converted]
    add("converted", 2, True, "--load", f"{converted}/torch_dist")
    fine = ("--ckpt-step", "2", "--finetune", "--no-load-optim", "--train-iters", "2")
    add("fine-plain", 1, False, "--load", plain, *fine)
    add("fine", 1, True, "--load", ours, *fine, undo=True)
    add("tp-plain", 2, False, *TP_2)
    add("tp-ours", 2, True, *TP_2, "--save-interval", "2")
    add("tp-resumed", 2, True, *TP_2, "--load", tp_ours, "--ckpt-step", "2")
    fork(root, runs)
    resumed = start(
        root,
        "resumed",
        launch.run_mpi,
        *(*KEEP_2, "--load", ours, "--use-checkpoint-args", "--ckpt-fully-parallel-load"),
        *("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"),
        *("--dist-ckpt-strictness", "raise_unexpected", "--verify-integrity"),
    )
    return {
        "begun": begun,
        "resumed": resumed,
        **{run["name"]: Ended(root / run["name"], run["size"]) for run in runs},
    }


def fork(root, runs):
    """Make `runs` by ``training_runs.py``."""
    path = os.pathsep.join([str(SITE), str(ROOT)])
    subprocess.run(
        [sys.executable, str(FOLDER / "training_runs.py"), str(root)],
        input=json.dumps(runs),
        text=True,
        check=True,
        timeout=240,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "MEGATRON_URING_SLAB_BYTES": str(1 << 20),
            "MEGATRON_URING_SLAB_COUNT": "4",
        },
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("training")


@pytest.fixture
def ended(root, record_property):
    """A run by its name, which must have ended well unless it is not to."""
    if SITE is None:
        pytest.skip("megatron-core: the wheel of this version has no megatron.training")
    version = next(iter(metadata.distributions(name="megatron-core", path=[str(SITE)]))).version
    record_property("megatron-core", version)
    if version.startswith(("0.17.", "0.18.")):
        pytest.skip("pretrain() takes other arguments than pretrain.py gives it")

    def find(name, well=True):
        run = all_runs(root)[name]
        assert not (well and any(run.statuses())), run.output()[-6000:]
        return run

    return find


@pytest.fixture
def root_of(tmp_path, save):
    """A folder with iterations: "ours", "theirs" and "torch" are committed, "debris" is not."""

    def make(tracker=None, **kinds):
        for name, kind in kinds.items():
            directory = tmp_path / f"iter_{int(name.strip('_')):07d}"
            directory.mkdir()
            (directory / "other.txt").write_text("somebody's")
            if kind == "ours":
                save({"weight": torch.arange(9)}, directory)
            if kind == "theirs":
                text = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
                (directory / "metadata.json").write_text(text)
            if kind == "torch":
                (directory / "mp_rank_00").mkdir()
        if tracker is not None:
            (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
        return tmp_path

    return make


def remove(root, iteration):
    """What Megatron does to delete a checkpoint; whether it is gone."""
    directory = root / f"iter_{iteration:07d}"
    training.remove_checkpoint(None, shutil.rmtree, directory)
    return not directory.exists()


def test_the_newest_committed_checkpoint_is_never_deleted_and_older_ones_are(root_of, caplog):
    root = root_of("30", _10="ours", _20="theirs", _30="ours", _40="debris", _5="debris")
    assert not remove(root, 30) and "newest committed" in caplog.text
    assert (root / "iter_0000030" / "index.h5").exists()
    assert not remove(root, 40) and "may be about to be saved" in caplog.text
    assert remove(root, 20) and remove(root, 10) and remove(root, 5)


@pytest.mark.parametrize("tracker", [None, "", "40", "99"])
def test_without_a_tracker_that_can_be_believed_the_highest_committed_one_is(root_of, tracker):
    root = root_of(tracker, _10="ours", _30="theirs", _40="debris")
    assert not remove(root, 30) and remove(root, 10)


def test_after_a_step_back_what_the_tracker_names_is_the_newest(root_of):
    root = root_of("10", _10="ours", _30="ours")
    assert not remove(root, 10) and remove(root, 30)


def test_checkpoints_of_other_formats_are_retained_as_megatron_likes(root_of):
    root = root_of("30", _10="ours", _20="torch", _30="torch")
    assert not remove(root, 30) and remove(root, 20) and remove(root, 10)


def test_where_nothing_is_committed_and_what_is_no_iteration_megatron_decides(root_of):
    root = root_of(_10="debris", _20="debris")
    (root / "other").mkdir()
    training.remove_checkpoint(None, shutil.rmtree, root / "other")
    assert not (root / "other").exists()
    assert remove(root, 20) and remove(root, 10)


def test_what_is_being_saved_stays_until_it_is_committed(root_of, world, posix, caplog):
    root = root_of("30", _30="ours")
    state, directory = {"weight": torch.arange(9)}, root / "iter_0000010"
    pending = megatron_uring.save_async(state, directory, config=posix, communicator=world)
    assert not remove(root, 10) and "being saved" in caplog.text
    pending.wait()
    assert remove(root, 10)


def test_half_of_a_deleted_checkpoint_is_none(root_of):
    root = root_of("30", _10="ours", _30="ours")

    def stop(path):
        raise OSError(f"{path} stays half")

    with pytest.raises(OSError, match="half"):
        training.remove_checkpoint(None, stop, root / "iter_0000010")
    assert os.listdir(root / "iter_0000010") == ["other.txt"]


def test_the_tracker_is_the_old_one_until_it_is_the_new_one(tmp_path):
    path = tmp_path / "latest_checkpointed_iteration.txt"
    path.write_text("10")
    with training.open_tracker(None, open, str(path), "w") as file:
        file.write("20")
        file.flush()
        assert path.read_text() == "10"
    assert path.read_text() == "20"
    with pytest.raises(KeyError), training.open_tracker(None, open, str(path), "w") as file:
        file.write("30")
        raise KeyError
    file = training.open_tracker(None, open, path, "w")
    file.write("release")
    assert path.read_text() == "20"
    file.close()
    file.close()
    assert path.read_text() == "release" and os.listdir(tmp_path) == [path.name]
    with training.open_tracker(None, open, path, "r") as file:
        assert file.read() == "release"
    with training.open_tracker(None, open, tmp_path / "other", "w") as file:
        file.write("at once")
        file.flush()
        assert (tmp_path / "other").read_text() == "at once"


def test_a_tracker_that_is_a_link_stays_one(tmp_path):
    path, target = tmp_path / "latest_checkpointed_iteration.txt", tmp_path / "elsewhere"
    path.symlink_to(target)
    with training.open_tracker(None, open, path, "w") as file:
        file.write("40")
    assert path.is_symlink() and target.read_text() == "40"


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, True),
        ({"non_persistent_ckpt_type": "global"}, True),
        ({"use_persistent_ckpt_worker": True}, True),
        ({"ckpt_format": "torch_dcp"}, False),
        ({"ckpt_format": "fsdp_dtensor"}, False),
        ({"non_persistent_ckpt_type": "local"}, False),
        ({"logits_save_dir": "/somewhere"}, False),
        ({"async_save": False}, False),
    ],
    ids=str,
)
def test_async_save_stays_on_without_a_helper_process_where_all_saves_are_ours(options, kept):
    default = {"async_save": True, "use_persistent_ckpt_worker": False, "ckpt_format": "torch_dist"}
    parsed = SimpleNamespace(**{**default, **options})
    asked = parsed.use_persistent_ckpt_worker

    def validate_args(parsed, defaults):  # what Megatron's does with these two
        parsed.async_save = parsed.async_save and parsed.use_persistent_ckpt_worker
        return defaults

    assert training.validate_args(None, validate_args, parsed, "defaults") == "defaults"
    assert (parsed.async_save, parsed.use_persistent_ckpt_worker) == (kept, asked)


class TestRuns:
    pytestmark = pytest.mark.megatron

    def test_a_run_that_stopped_and_resumed_has_the_losses_of_one_that_did_not(self, ended):
        whole = ended("plain").losses()
        assert [number for number, _ in whole[0]] == [1, 2, 3, 4] and whole[0] != whole[1]
        parts = zip(ended("begun").losses(), ended("resumed").losses(), strict=True)
        assert [first + second for first, second in parts] == whole

    def test_megatrons_own_checkpoint_is_resumed_too(self, ended):
        found = ended("crossed").losses()
        expected = ended("plain").losses(first=3)
        assert [rank[:2] for rank in found] == expected

    def test_saves_are_ours_and_start_no_process(self, ended):
        for name in ("begun", "resumed"):
            for facts in ended(name).facts():
                status = facts["status"]
                assert (facts["children"], facts["forks"]) == ([], 0)
                assert (status["saves"], status["bypassed_saves"]) == (2, 0)
                assert status["last_save"]["asynchronous"] and status["in_flight"] == []
        for facts in ended("plain").facts():
            assert facts["status"] is None and facts["children"] != []  # Megatron's manager
        for facts in ended("resumed").facts():
            assert facts["status"]["last_save"]["communicator"].startswith("mpi")

    def test_retention_leaves_what_it_should(self, ended):
        assert ended("begun").iterations() == ["iter_0000002"]
        assert ended("resumed").iterations() == ["iter_0000004"]
        assert ended("begun").tracker() == "2" and ended("resumed").tracker() == "4"
        assert "successfully deleted checkpoint from iteration       1" in ended("begun").output()

    def test_old_non_persistent_checkpoints_go(self, ended):
        crossed = ended("crossed")
        assert crossed.iterations("non_persistent") == ["iter_0000005", "iter_0000006"]
        assert crossed.tracker("non_persistent") == "6"
        assert [facts["status"]["saves"] for facts in crossed.facts()] == [5, 5]

    def test_ours_is_refused_without_us_by_name_of_its_directory(self, ended):
        refused = ended("refused", well=False)
        assert refused.statuses() == [1]
        assert not (refused.folder / "losses-0.txt").exists()
        assert str(ended("begun").checkpoints / "iter_0000002") in refused.output()[-2000:]

    def test_other_formats_are_counted_and_said_once(self, ended):
        other = ended("to-torch")
        for facts in other.facts():
            assert (facts["status"]["saves"], facts["status"]["bypassed_saves"]) == (0, 1)
        said = [other.output(rank).count("was not written by megatron_uring") for rank in (0, 1)]
        assert said == [1, 0]

    def test_converting_there_and_back_changes_nothing(self, ended):
        assert [facts["status"]["saves"] for facts in ended("from-torch").facts()] == [1, 1]
        assert ended("converted").losses() == ended("plain").losses(first=3)

    def test_fine_tuning_from_other_ranks_starts_like_megatrons(self, ended):
        found = ended("fine").losses()
        assert [number for number, _ in found[0]] == [1, 1, 2, 2]
        assert found == ended("fine-plain").losses()

    def test_tensor_parallel_ranks_resume(self, ended):
        whole = ended("tp-plain").losses()
        assert ended("tp-ours").losses() == whole
        assert ended("tp-resumed").losses() == ended("tp-plain").losses(first=3)
        assert ended("tp-ours").facts()[0]["status"]["saves"] == 2
