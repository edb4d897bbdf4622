"""Writing of checkpoints in the folder of an earlier one, replaced in a single step."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult


class ReplacingWriter(FileSystemWriter):
    """A ``FileSystemWriter`` leaving an earlier checkpoint whole until the new one is complete.

    The files of each save have names of their own. The last step is to replace ``.metadata``, which names them; then
    the files that it does not name are removed. Torch's writer overwrites the data of the earlier checkpoint first, so
    a save that is interrupted destroys it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.fs = _ReplacingFiles()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the folder."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give the files of all ranks names with the identifier drawn by rank 0 for this save."""

        def named(plan: SavePlan) -> SavePlan:
            data = plan.storage_data
            return dataclasses.replace(
                plan, storage_data=dataclasses.replace(data, prefix=f"__{self.save_id}{data.prefix}")
            )

        return [named(plan) for plan in super().prepare_global_plan(plans)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Replace the metadata, then remove the files of earlier saves, whole or interrupted."""
        super().finish(metadata, results)
        named = {result.storage_data.relative_path for of_rank in results for result in of_rank}
        for file in Path(self.path).glob("__*.distcp"):
            if file.name not in named:
                file.unlink()


class _ReplacingFiles(FileSystem):
    """Files whose ``rename`` replaces the target atomically, so that the writer need not remove it before."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        os.replace(path, new_path)

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Leave the file: the writer removes only what it renames another file to."""
