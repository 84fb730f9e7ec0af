"""Where checkpoints lie, and what a crash leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_smp.errors import CheckpointError, ConfigError
from lightning_smp.script.checkpoint_files import CheckpointFolder, tag_of


def write(folder: CheckpointFolder, tag: str, text: str = "") -> None:
    """A whole partial checkpoint."""
    folder.begin(tag)
    (folder.unfinished(tag) / "layout.pt").write_text(text)
    folder.commit(tag)
    folder.set_newest(tag, partial=True)


def test_a_checkpoint_appears_at_once(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "new" / "folder")
    folder.begin("one")
    (folder.unfinished("one") / "layout.pt").write_text("x")
    assert not folder.partial("one").exists()
    folder.commit("one")
    assert (folder.partial("one") / "layout.pt").read_text() == "x"
    folder.commit("one")  # as another node does that sees the same folder
    assert [file.name for file in folder.path.iterdir()] == ["one_partial"]


def test_overwriting_and_a_crash_in_the_middle_of_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    write(folder, "one", "old")
    write(folder, "one", "new")
    assert (folder.partial("one") / "layout.pt").read_text() == "new"
    assert {file.name for file in tmp_path.iterdir()} == {"newest", "one_partial"}
    folder.begin("one")
    (folder.unfinished("one") / "half").write_text("")
    (tmp_path / "one_partial").rename(tmp_path / "one_partial.former")  # and here it stops
    assert (folder.partial("one") / "layout.pt").read_text() == "new"
    write(folder, "one", "newer")
    assert (folder.partial("one") / "layout.pt").read_text() == "newer"
    assert {file.name for file in tmp_path.iterdir()} == {"newest", "one_partial"}


def test_newest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(CheckpointError, match="newest"):
        folder.newest(partial=True)
    folder.set_newest("step_1", partial=True)
    assert (tmp_path / "newest").read_text() == "step_1_partial"
    assert folder.newest(partial=True) == "step_1"
    with pytest.raises(CheckpointError, match="partial=True"):
        folder.newest(partial=False)
    folder.set_newest("model.pt", partial=False)
    assert folder.newest(partial=False) == "model.pt"
    with pytest.raises(CheckpointError, match="partial=False"):
        folder.newest(partial=True)


def test_the_oldest_go(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for number, tag in enumerate(("b", "a", "d", "c")):
        write(folder, tag)
        os.utime(folder.partial(tag) / "layout.pt", ns=(number, number))
    (tmp_path / "foreign_partial").mkdir()
    folder.prune(2)
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"newest", "d_partial", "c_partial", "foreign_partial"}
    folder.prune(5)
    assert {file.name for file in tmp_path.iterdir()} == left


def test_tags() -> None:
    assert tag_of("pytorch_model.bin") == "pytorch_model.bin"
    assert tag_of("one_partial") == "one"
    assert tag_of(7) == "7"
    for wrong in ("", ".", "..", "newest", "a/b", "/a", "../a"):
        with pytest.raises(ConfigError, match="plain name"):
            tag_of(wrong)
