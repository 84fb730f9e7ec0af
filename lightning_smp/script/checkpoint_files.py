"""How checkpoints lie on disk, and how one comes into being at once.

    path/
      {tag}_partial/          a partial checkpoint
        layout.pt             degrees of the run that wrote it, and what it holds
        model_{rankinfo}.pt   the part of each stage (rankinfo: pp_rank, or pp_rank_tp_rank)
        optimizer_{rankinfo}.pt
        user_content.pt
      {tag}                   the model of a full checkpoint
      user_content_{tag}      its user content
      newest                  name of the last one, with `_partial` if it is

A partial checkpoint is written under another name and renamed when every rank is through; `newest`
is written last. This module knows files only; it never communicates.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lightning_smp.errors import CheckpointError, ConfigError
from lightning_smp.script.saving import whole_file

__all__ = ["CheckpointFolder", "tag_of"]

_PARTIAL: Final = "_partial"
_UNFINISHED: Final = ".unfinished"
_FORMER: Final = ".former"


class CheckpointFolder:
    """The folder that checkpoints of a run lie in.

    Args:
        path: the folder; it need not exist to be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def full(self, tag: str) -> Path:
        """The model's file of a full checkpoint."""
        return self.path / tag

    def full_user_content(self, tag: str) -> Path:
        """The user content's file of a full checkpoint."""
        return self.path / f"user_content_{tag}"

    def partial(self, tag: str) -> Path:
        """The folder of a partial checkpoint, complete: after a crash perhaps the former one."""
        final = self.path / f"{tag}{_PARTIAL}"
        former = final.with_name(final.name + _FORMER)
        return former if former.is_dir() and not final.exists() else final

    def unfinished(self, tag: str) -> Path:
        """The folder that a partial checkpoint is written to."""
        return self.path / f"{tag}{_PARTIAL}{_UNFINISHED}"

    def begin(self, tag: str) -> None:
        """Makes the folder that a partial checkpoint is written to."""
        folder = self.unfinished(tag)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def commit(self, tag: str) -> None:
        """Gives a finished partial checkpoint its name; does nothing where that is done."""
        folder, final = self.unfinished(tag), self.path / f"{tag}{_PARTIAL}"
        if not folder.is_dir():
            return
        former = final.with_name(final.name + _FORMER)
        if final.exists():
            shutil.rmtree(former, ignore_errors=True)
            final.rename(former)
        folder.rename(final)
        shutil.rmtree(former, ignore_errors=True)

    def set_newest(self, tag: str, *, partial: bool) -> None:
        """Notes that `tag` is the last checkpoint."""
        with whole_file(str(self.path / "newest")) as temporary:
            Path(temporary).write_text(tag + _PARTIAL * partial, encoding="utf-8")

    def newest(self, *, partial: bool) -> str:
        """Returns the tag of the last checkpoint.

        Raises:
            CheckpointError: there is none, or it is of the other kind.
        """
        file = self.path / "newest"
        try:
            name = file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise CheckpointError(
                f"There is no file {str(file)!r}, so no checkpoint was completed here. Pass the "
                f"tag of one, or check the path."
            ) from None
        if name.endswith(_PARTIAL) != partial:
            kind = "partial" if name.endswith(_PARTIAL) else "full"
            raise CheckpointError(
                f"partial={partial} was asked for, and the newest checkpoint in "
                f"{str(self.path)!r}, {name!r}, is a {kind} one. Pass partial={not partial}, or "
                f"a tag."
            )
        return name.removesuffix(_PARTIAL)

    def prune(self, keep: int) -> None:
        """Deletes the oldest partial checkpoints beyond `keep`."""
        for folder in sorted(self._partials(), key=_finished_at)[:-keep]:
            shutil.rmtree(folder)

    def _partials(self) -> Iterator[Path]:
        return (
            folder
            for folder in self.path.glob(f"*{_PARTIAL}")
            if (folder / "layout.pt").is_file()  # nothing that somebody else put here
        )


def tag_of(tag: object) -> str:
    """Returns the tag, checked.

    Raises:
        ConfigError: it is no name of a file.
    """
    name = tag if isinstance(tag, str) else str(tag)
    if name in ("", ".", "..", "newest") or Path(name).name != name or name.endswith(_UNFINISHED):
        raise ConfigError(
            f"The tag {tag!r} names a file in the checkpoint's folder, so it must be a plain name "
            f"other than 'newest'. Put folders into `path`."
        )
    return name.removesuffix(_PARTIAL)


def _finished_at(folder: Path) -> int:
    return (folder / "layout.pt").stat().st_mtime_ns
