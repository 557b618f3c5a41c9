"""The files that resilient-run writes for each rank, and what happens where it cannot."""

import re

import pytest
from launching import run, shell


def begins(rank):
    return re.compile(rf"=== \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ rank {rank} begins, pid (\d+)")


def test_each_rank_has_its_files(tmp_path):
    logs = tmp_path / "deep" / "logs"
    script = shell(tmp_path, 'echo "out $RANK"; echo "err $RANK" >&2')
    code, stdout, stderr = run("--nproc", 2, "--log-dir", logs, *script)
    assert code == 0, stderr
    assert sorted(stdout.splitlines()) == ["[0] out 0", "[1] out 1"]
    for rank in (0, 1):
        for stream in ("out", "err"):
            first, *lines = (logs / f"rank-{rank}.{stream}").read_text().splitlines()
            assert begins(rank).fullmatch(first)
            assert lines == [f"{stream} {rank}"]


def test_a_replacement_goes_on_in_the_same_file(tmp_path):
    logs = tmp_path / "logs"
    script = shell(tmp_path, f"echo $$; [ -e {tmp_path}/x ] || {{ touch {tmp_path}/x; exit 7; }}")
    for _ in range(2):  # The second job too.
        code, _, stderr = run("--nproc", 1, "--log-dir", logs, *script)
        assert code == 0, stderr
    lines = (logs / "rank-0.out").read_text().splitlines()
    assert len(lines) == 6
    assert [begins(0).fullmatch(line)[1] for line in lines[::2]] == lines[1::2]


def test_only_to_the_files(tmp_path):
    script = shell(tmp_path, "echo out; echo err >&2")
    code, stdout, stderr = run("--log-dir", tmp_path / "logs", "--log-only", *script)
    assert (code, stdout, stderr) == (0, "", "")
    assert (tmp_path / "logs" / "rank-0.err").read_text().splitlines()[1:] == ["err"]


def test_only_to_files_that_are_not_named(tmp_path):
    code, _, stderr = run("--log-only", *shell(tmp_path, "exit 0"))
    assert code == 2
    assert "--log-only needs --log-dir" in stderr


@pytest.mark.parametrize("options", [[], ["--log-only"]])
def test_a_full_disk_ends_nothing(tmp_path, options):
    (tmp_path / "rank-1.out").symlink_to("/dev/full")
    script = shell(tmp_path, 'for i in 1 2 3; do echo "$RANK $i"; done')
    code, stdout, stderr = run("--nproc", 2, "--log-dir", tmp_path, *options, *script)
    assert code == 0, stderr
    assert stderr.count("\n") == 1
    assert f"{tmp_path}/rank-1.out cannot be written (No space left on device)" in stderr
    assert [line for line in stdout.splitlines() if line.startswith("[1]")] == [
        f"[1] 1 {number}" for number in (1, 2, 3)
    ]


def test_a_directory_that_cannot_be_made_ends_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    logs = tmp_path / "file" / "logs"
    code, stdout, stderr = run("--nproc", 1, "--log-dir", logs, *shell(tmp_path, "echo here"))
    assert (code, stdout) == (0, "[0] here\n")
    assert stderr.count("\n") == 1
    assert "cannot be written (Not a directory)" in stderr


def test_a_console_that_is_full_ends_nothing(tmp_path):
    with open("/dev/full", "w") as full:
        options = ["--nproc", 1, "--log-dir", tmp_path / "logs"]
        code = run(*options, *shell(tmp_path, "echo here"), stdout=full, stderr=full)[0]
    assert code == 0
    assert (tmp_path / "logs" / "rank-0.out").read_text().splitlines()[1:] == ["here"]
