"""The run folder: one process at a time, nothing of the user's deleted, records that can be read or count as none."""

import subprocess
import sys

import pytest

from piebridge.core.errors import UserError
from piebridge.core.run_folder import RunFolder

HOLD = """
import sys
from piebridge.core.run_folder import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("locked", flush=True)
    sys.stdin.readline()
"""


def test_a_second_process_is_refused_until_the_first_has_gone(tmp_path):
    folder = RunFolder(tmp_path / "run")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              universal_newlines=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match="another process is training here; wait for it or choose output=DIR"), folder.locked():
            pytest.fail("two processes in one folder")
    finally:
        holder.kill()  # no chance to clean up
        holder.communicate()
    with folder.locked():
        with pytest.raises(UserError, match="another process"), RunFolder(folder.path).locked():
            pytest.fail("locked twice")
    with folder.locked():  # the lock is given back
        pass


def test_a_folder_that_cannot_be_one_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=f"output={path}: cannot be used as a run folder: "), RunFolder(path).locked():
            pytest.fail("a file is no folder")
    assert (tmp_path / "file").read_text() == "mine"


def fill(folder):
    """A whole run, and files of the user's beside it and in it."""
    (folder.cache_folder / "original").mkdir(parents=True)
    (folder.cache_folder / "original" / "features.f32").write_bytes(b"1234")
    for path in (folder.trainable_file, folder.tuned_file, folder.splits_file, folder.log_file, folder.metrics_file):
        path.write_text("of the run")
    folder.write_record({"status": "failed", "config": {}})
    for name in ("config.yaml", "notes.txt", "seed_1/run.json", "run.json.backup", "photos/a.jpg"):
        path = folder.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")


def files_of(folder):
    return sorted(path.relative_to(folder.path).as_posix() for path in folder.path.glob("**/*") if path.is_file())


def test_clear_takes_what_a_run_wrote_and_nothing_else(tmp_path):
    folder = RunFolder(tmp_path)
    fill(folder)
    folder.drop_cache()
    assert not folder.cache_folder.exists() and folder.checkpoint_folder.is_dir()
    folder.clear()
    assert files_of(folder) == ["config.yaml", "notes.txt", "photos/a.jpg", "run.json.backup", "seed_1/run.json"]
    assert not folder.checkpoint_folder.exists()
    folder.clear()  # nothing is left to clear


def test_finished_runs_and_files_of_somebody_else_are_refused(tmp_path):
    folder = RunFolder(tmp_path)
    folder.refuse_finished()
    folder.refuse_foreign()
    fill(folder)
    folder.refuse_finished()  # failed, so it may be replaced
    folder.refuse_foreign()
    folder.record_file.unlink()
    with pytest.raises(UserError, match="has trainable.safetensors but no run.json of a run, so it is not a run's folder; choose"):
        folder.refuse_foreign()
    folder.write_record({"status": "success", "config": {}})
    with pytest.raises(UserError, match="holds a finished run; add overwrite=true to replace it, or output=DIR to keep it"):
        folder.refuse_finished()


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"', "\xff"])
def test_a_record_that_is_none_counts_as_none(tmp_path, text):
    folder = RunFolder(tmp_path)
    assert folder.record() is None
    folder.record_file.write_bytes(text.encode("latin-1"))
    assert folder.record() is None
    folder.refuse_finished()


def test_metrics_have_a_row_per_epoch_and_the_log_a_line_per_evaluation(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_metrics([])
    assert files_of(folder) == []
    rows = [(1, 0.5, 1.234), (2, None, 2.5), (3, 1 / 3, 10.0)]
    folder.write_metrics([dict(zip(("epoch", "val_accuracy", "train_seconds"), row)) for row in rows])
    assert folder.metrics_file.read_text() == "epoch,val_accuracy,train_seconds\n1,0.5,1.234\n2,,2.5\n3,0.3333333333333333,10.0\n"
    assert folder.log_file.read_text() == "0.5000 1.23\n0.3333 10.00\n"


@pytest.mark.parametrize("text", ["", "[1]", '{"status": "success"}', '{"status": "failed", "config": null}', '{"a": 1}'])
def test_files_beside_a_record_that_is_no_runs_are_somebodys(tmp_path, text):
    (tmp_path / "log.txt").write_text("mine")
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match="has log.txt but no run.json of a run"):
        RunFolder(tmp_path).refuse_foreign()


def test_results_do_not_go_among_the_images_nor_over_the_network_they_start_from(tmp_path):
    for inside in (tmp_path, tmp_path / "run"):
        with pytest.raises(UserError, match="lies inside the images"):
            RunFolder(inside).refuse_inside("the images", tmp_path)
    RunFolder(tmp_path.parent / (tmp_path.name + "_run")).refuse_inside("the images", tmp_path)
    with pytest.raises(UserError, match="is a file of the run folder itself"):
        RunFolder(tmp_path).refuse_own(tmp_path / "tuned.safetensors")
    RunFolder(tmp_path).refuse_own("efficientnet_lite0")
