"""``rltr world build`` on places that cannot take a world."""

from __future__ import annotations

from typer.testing import CliRunner

from rltr_verl.cli.main import app


def test_a_place_that_cannot_be_written_is_one_clear_error():
    done = CliRunner().invoke(app, ["world", "build", "--out", "/proc/world"])
    assert done.exit_code == 2
    assert "DiskError: --out" in done.output and "Fix:" in done.output and "Traceback" not in done.output


def test_a_file_in_the_way_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("x")
    done = CliRunner().invoke(app, ["world", "build", "--out", str(tmp_path / "file" / "world")])
    assert done.exit_code == 2
    assert "cannot be written" in done.output
