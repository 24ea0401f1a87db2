"""What put the files of a ZeRO run together by hand: published scripts import it from both generations."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from orttrainer import checkpoint
from orttrainer.errors import CheckpointError


def list_checkpoint_files(
    checkpoint_dir: str | os.PathLike, checkpoint_prefix: str, extension: str = ".ort.pt"
) -> list[str]:
    """The paths of the files whose names begin and end so.

    Raises:
        CheckpointError: there is none.
    """
    names = sorted(os.listdir(checkpoint_dir))
    if found := [name for name in names if name.startswith(checkpoint_prefix) and name.endswith(extension)]:
        return [os.path.join(checkpoint_dir, name) for name in found]
    raise CheckpointError(f"No checkpoint found with prefix {checkpoint_prefix!r} at {os.fspath(checkpoint_dir)!r}")


class CombineZeroCheckpoint:
    """The state of a run whose ranks have it in parts.

    Args:
        checkpoint_files: the paths of all ranks' files, in any order; or of the one file of a run that has it whole.
        clean_state_dict: called with the state of each rank; returns what is taken of it.

    Example: `model.load_state_dict(CombineZeroCheckpoint(files).aggregate_checkpoints(), strict=False)`
    """

    def __init__(self, checkpoint_files: Sequence[str], clean_state_dict: Callable[[dict], dict] | None = None):
        if not checkpoint_files:
            raise CheckpointError("No checkpoint files passed")
        self.checkpoint_files, self.clean_state_dict = checkpoint_files, clean_state_dict

    def aggregate_checkpoints(self) -> dict[str, torch.Tensor]:
        """Name -> tensor, each whole.

        Raises:
            CheckpointError: as `orttrainer.checkpoint.load_checkpoint`.
        """
        folder, name = os.path.split(self.checkpoint_files[0])
        prefix = name.split(".ZeRO.")[0].removesuffix(".ort.pt")
        states = {file: entries["model"] for file, entries in checkpoint.read_all(folder or ".", prefix).items()}
        if self.clean_state_dict is not None:
            states = {file: self.clean_state_dict(state) for file, state in states.items()}
        return checkpoint.whole(states)


# In the second generation.
_list_checkpoint_files, _CombineZeroCheckpoint = list_checkpoint_files, CombineZeroCheckpoint
