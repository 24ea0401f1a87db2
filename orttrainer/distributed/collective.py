"""The interface that the trainer sees, and its implementation for one process."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, final

from orttrainer.errors import DistributedError, InvalidArgumentError

if TYPE_CHECKING:
    import torch


class Collective(abc.ABC):
    """What the ranks of one training run do together.

    Every rank makes the same calls in the same order, with tensors of equal shape and dtype.
    A call returns when its result is in memory (also CUDA memory): whoever reads it next, on
    whatever stream, reads the result. In the same way a caller hands over finished tensors:
    what torch's current stream still writes is waited for, other streams are not.

    Attributes:
        rank: number of this process, 0 to size - 1.
        size: number of processes, the world size.
        local_rank: number of this process among those on the same machine.
    """

    rank: int
    size: int
    local_rank: int

    @abc.abstractmethod
    def all_reduce_mean_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its mean over all ranks, in place; equal bits on every rank.

        Args:
            tensor: contiguous, of any shape, floating point, on the CPU or on CUDA. On the CPU
                float16 and bfloat16 are summed in float32.

        Raises:
            InvalidArgumentError: the tensor is not contiguous or not floating point.
            DistributedError: the communication failed.
        """

    @abc.abstractmethod
    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Overwrite a tensor with the one of rank `root`, in place, bit for bit.

        Args:
            tensor: of any shape, strides and dtype, on the CPU or on CUDA.
            root: the rank whose tensor is sent.

        Raises:
            InvalidArgumentError: `root` is no rank.
            DistributedError: the communication failed.
        """

    @abc.abstractmethod
    def all_gather_object(self, obj: Any) -> list:
        """Return the objects of all ranks, in rank order.

        Args:
            obj: a small object that can be pickled.

        Raises:
            DistributedError: the communication failed.
        """

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called this.

        Raises:
            DistributedError: the communication failed.
        """

    @abc.abstractmethod
    def tell_left(self, why: str) -> None:
        """Let the other ranks fail that wait for this one, which has left a call in its midst and makes no further one.

        Args:
            why: the error, for their messages.
        """


@final
class SingleProcess(Collective):
    """The one process is rank 0 of 1: it checks its arguments and has nothing to do."""

    def __init__(self) -> None:
        self.rank, self.size, self.local_rank = 0, 1, 0

    def all_reduce_mean_(self, tensor: torch.Tensor) -> None:
        check_mean_operand(tensor)

    def broadcast_(self, tensor: torch.Tensor, root: int = 0) -> None:
        check_root(root, self.size)

    def all_gather_object(self, obj: Any) -> list:
        return [obj]

    def barrier(self) -> None:
        pass

    def tell_left(self, why: str) -> None:
        pass


def check_ranks_agree(
    collective: Collective,
    what: str,
    value: Any,
    advice: str = "Build the same model with the same arguments on every rank.",
) -> None:
    """Raise on every rank, unless all ranks have the same value.

    Call it before the first collective on tensors: ranks whose buffers differ in size corrupt
    memory or wait for ever, and neither says why.

    Args:
        collective: the ranks to compare.
        what: name of the value, for the message, such as "trained parameters".
        value: a small object that can be pickled and compared with `==`.
        advice: what to do, for the message.

    Raises:
        DistributedError: some rank's value differs from rank 0's.

    Example: `check_ranks_agree(collective, "trained parameters", [(name, shape), ...])`
    """
    values = collective.all_gather_object(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise DistributedError(
                f"the ranks differ in {what}: rank 0 has {_difference(values[0], other)}, "
                f"rank {rank} has {_difference(other, values[0])}. "
                f"{advice}"
            )


def _difference(value: Any, other: Any) -> str:
    """Describe a value; of two sequences only the first element in which they differ."""
    if not (isinstance(value, (list, tuple)) and isinstance(other, (list, tuple))):
        return repr(value)
    for index, element in enumerate(value):
        if index >= len(other) or other[index] != element:
            return f"{element!r} at index {index} of {len(value)}"
    return f"{len(value)} elements"


def check_mean_operand(tensor: torch.Tensor) -> None:
    """Raise InvalidArgumentError, unless the tensor can be averaged in place."""
    if not tensor.is_floating_point():
        raise InvalidArgumentError(
            f"cannot average a tensor of dtype {tensor.dtype} over ranks: "
            f"give a floating-point tensor, or use broadcast_ for integers."
        )
    if not tensor.is_contiguous():
        raise InvalidArgumentError(
            f"cannot average a tensor with strides {tuple(tensor.stride())} and shape "
            f"{tuple(tensor.shape)} in place: give a contiguous tensor."
        )


def check_root(root: int, size: int) -> None:
    """Raise InvalidArgumentError, unless `root` is a rank."""
    if not 0 <= root < size:
        raise InvalidArgumentError(f"root={root!r} is no rank: ranks are 0 to {size - 1}.")


def communication_failed(collective: Collective, call: str, error: Exception) -> DistributedError:
    """Restate an error of MPI or torch.distributed, with the rank and the call in it."""
    return DistributedError(
        f"{call} failed on rank {collective.rank} of {collective.size}: {error}. Either another "
        f"rank has ended or died, or the ranks made different calls or gave different shapes or dtypes."
    )
