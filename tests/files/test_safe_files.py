"""JSON lines: what a resumed log keeps."""

import pytest

from common.cli import UserError
from common.files.safe_files import JsonLinesLog, read_json_lines


def test_json_lines_log_drops_repeated_and_torn_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonLinesLog(path, keep_through=-1)
    for step in (1, 5, 10, 15):
        log.write({"step": step, "loss": 3.0 - step / 100})
    with open(path, "a") as file:
        file.write('{"step": 20, "lo')  # the crash
    assert [row["step"] for row in read_json_lines(path)] == [1, 5, 10, 15]
    resumed = JsonLinesLog(path, keep_through=10)
    assert [row["step"] for row in read_json_lines(path)] == [1, 5, 10]
    resumed.write({"step": 15, "loss": 0.5})
    assert read_json_lines(path)[-1] == {"step": 15, "loss": 0.5}
    assert len(read_json_lines(path)) == 4
    JsonLinesLog(path, keep_through=-1)
    assert read_json_lines(path) == []


def test_broken_row_before_the_last_loses_no_rows_after_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step"; 2}\n{"step": 3}\n')
    with pytest.raises(UserError, match="metrics.jsonl, line 2: not JSON"):
        JsonLinesLog(path, keep_through=3)
    assert path.read_text().count("\n") == 3
