"""Which sources `make lint` looks at: none that a change may have made wrong is left out."""

import os
import subprocess
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))

import affected

TREE = {
    "runtime/base/log.h": "",
    "runtime/base/log.cc": '#include "runtime/base/log.h"\n',
    "runtime/include/resilient/status.h": "",
    "store/core/world.h": "#include <resilient/status.h>\n",
    "store/core/world.cc": '#include <map>\n\n#include "store/core/world.h"\n',
    "store/core/keys.cc": '#include "runtime/base/log.h"\n',
}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (["store/core/keys.cc"], {"store/core/keys.cc"}),
        (
            ["runtime/base/log.h"],
            {"runtime/base/log.h", "runtime/base/log.cc", "store/core/keys.cc"},
        ),
        (
            ["runtime/include/resilient/status.h"],
            {"runtime/include/resilient/status.h", "store/core/world.h", "store/core/world.cc"},
        ),
        (["docs/testing.md"], {"docs/testing.md"}),
        ([], set()),
    ],
)
def test_what_includes_a_changed_header_is_affected(changed, found):
    assert affected.affected(changed, TREE) == found


@pytest.mark.parametrize(
    "path", [".clang-tidy", "CMakeLists.txt", "store/core/store.proto", "tests/lint.sh"]
)
def test_what_all_findings_depend_on_changes_everything(path):
    assert affected.changes_everything(path)
    assert not affected.changes_everything("store/core/CMakeLists.txt")


@pytest.fixture
def tree(monkeypatch, tmp_path):
    """TREE as a repository on which everything has passed; nothing of it is in a commit."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    monkeypatch.setattr(affected, "RECORD", tmp_path / ".git" / "passed")
    subprocess.run(("git", "init", "--quiet"), cwd=tmp_path, check=True)
    assert affected.main(["record"]) == 0
    return tmp_path


FILES = ["runtime/base/log.cc", "store/core/keys.cc", "store/core/world.cc"]


def test_only_what_changed_since_the_record_is_checked(tree):
    assert affected.to_check(FILES) == []
    (tree / "store/core/world.h").write_text("struct World;\n")
    assert affected.to_check(FILES) == ["store/core/world.cc"]
    (tree / "runtime/base/log.h").unlink()
    assert affected.to_check(FILES) == FILES


def test_new_and_removed_sources_are_noticed(tree):
    (tree / "store/core/new.cc").write_text('#include "runtime/base/log.h"\n')
    assert affected.to_check([*FILES, "store/core/new.cc"]) == ["store/core/new.cc"]
    (tree / "store/core/new.cc").unlink()
    assert affected.to_check(FILES) == []


def test_without_a_record_or_with_other_rules_everything_is_checked(tree):
    (tree / "CMakeLists.txt").write_text("project(other)\n")
    assert affected.to_check(FILES) == FILES
    assert affected.main(["record"]) == 0
    assert affected.to_check(FILES) == []
    affected.RECORD.unlink()
    assert affected.to_check(FILES) == FILES
