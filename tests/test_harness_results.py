"""Results files as experiments read them: whole lines, or one line of what is wrong."""

import dataclasses
import json

import pytest

from experiments import finetune, harness, vision
from experiments.harness import ExitCode, UserError

pytestmark = pytest.mark.once


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing."""


def test_lines_come_back_and_a_cut_one_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "new" / "r.jsonl"
    assert harness.results(path) == []
    assert not path.exists()  # asked for, and not made
    harness.record(path, Config(), {"é": 1})
    with path.open("a") as file:
        file.write('{"é": 2, "cu')
    (row,) = harness.results(path)
    assert row["é"] == 1
    harness.record(path, Config(), {"é": 3})
    assert [row["é"] for row in harness.results(path)] == [1, 3]


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"a": 1}) + "\nno\n")
    with pytest.raises(UserError, match="line 2 of .* isn't a result") as caught:
        harness.results(path)
    assert caught.value.code == ExitCode.DATA


@pytest.mark.parametrize("kind", ["a folder", "bytes", "nowhere"])
def test_what_cannot_be_read_and_written_is_known_before_any_work(tmp_path, kind):
    path = tmp_path / "r.jsonl"
    match kind:
        case "a folder":
            path.mkdir()
        case "bytes":
            path.write_bytes(b"\xff\xfe\n")
        case "nowhere":
            (tmp_path / "file").touch()
            path = tmp_path / "file" / "r.jsonl"
    with pytest.raises(UserError, match="can't be read and written") as caught:
        harness.results(path)
    assert caught.value.code == ExitCode.CONFIG


@pytest.mark.parametrize("of", [finetune, vision])
def test_no_experiment_trains_for_a_file_it_cannot_write(of, tmp_path, capsys):
    (tmp_path / "file").touch()
    arguments = [f"--results={tmp_path / 'file' / 'r.jsonl'}", "--data=none"]
    code = harness.run_main(of.main, of.Config, arguments)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert (code, "can't be read and written" in error) == (ExitCode.CONFIG, True)


def test_results_stand_without_a_picture_where_nothing_draws(tmp_path, capsys):
    def draw(found, path):
        raise ModuleNotFoundError("No module named 'matplotlib'")

    harness.show_picture(lambda found, path: path, {}, tmp_path / "i.png")
    harness.show_picture(draw, {}, tmp_path / "i.png")
    drawn, missing = capsys.readouterr().out.splitlines()
    assert drawn == f"picture: {tmp_path / 'i.png'}"
    assert missing == "no picture: No module named 'matplotlib'; the results are kept"
