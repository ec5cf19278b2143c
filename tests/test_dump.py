"""Per-trajectory dump: whole lines, safe against a full disk."""

import json
import logging
import os

import numpy as np
import pytest

from rltr_verl.dump import TrajectoryDump
from rltr_verl.errors import DiskError


def lines(dump):
    return [json.loads(line) for line in dump.path.read_text("utf-8").splitlines() if line]


def test_a_line_stands_in_the_file_when_write_returns(tmp_path):
    dump = TrajectoryDump(tmp_path / "new" / "folder")
    dump.write({"a": 1})
    assert lines(dump) == [{"a": 1}]
    dump.write({"text": "两\nlines"})
    assert lines(dump) == [{"a": 1}, {"text": "两\nlines"}]
    assert str(os.getpid()) in dump.path.name


def test_numbers_of_numpy_are_json_numbers(tmp_path):
    dump = TrajectoryDump(tmp_path)
    dump.write({"step": np.int64(3), "share": np.float32(0.5), "flag": np.bool_(True), "ids": np.arange(2)})
    assert lines(dump) == [{"step": 3, "share": 0.5, "flag": True, "ids": [0, 1]}]


def test_an_earlier_run_is_kept(tmp_path):
    for number in range(2):
        dump = TrajectoryDump(tmp_path)
        dump.write({"run": number})
        dump.close()
    assert lines(dump) == [{"run": 0}, {"run": 1}]


def test_lone_surrogates_do_not_stop_it(tmp_path):
    dump = TrajectoryDump(tmp_path)
    dump.write({"text": "\ud83c"})
    assert len(lines(dump)) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_warning_and_later_lines_are_whole(tmp_path, caplog):
    dump = TrajectoryDump(tmp_path)
    real = dump._file
    with open("/dev/full", "wb", buffering=0) as full, caplog.at_level(logging.WARNING):
        dump._file = full
        dump.write({"lost": 1})
        dump.write({"lost": 2})
    dump._file = real
    dump.write({"kept": 3})
    assert lines(dump) == [{"kept": 3}]
    assert len(caplog.records) == 1 and "No space left" in caplog.text


def test_a_line_torn_by_a_short_write_does_not_spoil_the_next(tmp_path):
    class Short:
        """A file that takes only half of the first write, as a disk that fills up does."""

        def __init__(self, file):
            self.file, self.first = file, True

        def write(self, data):
            data, self.first = data[: len(data) // 2] if self.first else data, False
            return self.file.write(data)

    dump = TrajectoryDump(tmp_path)
    dump._file = Short(dump._file)
    dump.write({"torn": "x" * 50})
    dump.write({"whole": 1})
    assert json.loads(dump.path.read_text().splitlines()[-1]) == {"whole": 1}


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="rltr.dump_dir: cannot write to.*Fix:"):
        TrajectoryDump(tmp_path / "file" / "folder")
