"""The extension that `make extension` builds from ``csrc``."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.futures import Future

def give_cpu_streams(has: bool) -> None:
    """Say whether CPU tensors have streams, as those of the tests' device do."""

class Task:
    """A transfer, or a collective with all its slices; it completes with the last of them."""

    @property
    def name(self) -> str: ...
    def wait(self, timeout_s: float | None = None) -> None:
        """Block the host until it is complete, on a GPU too.

        Raises:
            RuntimeError: the job's first failure, with this task's name; or a timeout.
        """

    def is_completed(self) -> bool: ...
    def get_future(self) -> Future[None]:
        """Return a future that completes when all operations have ended or the job has failed."""

class Waiter:
    """A thread that waits for operations of one group and direction, in the order of their start.

    It runs while there are any.
    """

class Policy:
    """How a scheduler decides; ``csrc/scheduler.h`` says what each value means."""

    rank: int
    slices_in_flight: int
    lease_s: float
    pause_share: float
    window_s: float
    timeout_s: float

class Statistics:
    """What a scheduler has done so far."""

    @property
    def transfers(self) -> int: ...
    @property
    def slices(self) -> int: ...
    @property
    def announced(self) -> int: ...
    @property
    def unanswered(self) -> int: ...
    @property
    def paused_s(self) -> float: ...
    @property
    def exhausted(self) -> int: ...
    @property
    def slice_s(self) -> float: ...

class Scheduler:
    """One thread that starts all communication, until `shutdown` or until nobody has it."""

    def __init__(self, policy: Policy) -> None: ...
    def send(
        self,
        group: ProcessGroup,
        tensor: Tensor,
        waiter: Waiter,
        group_peer: int,
        tag: int,
        peer: int,
        direction: int,
        name: str,
    ) -> Task:
        """Send ``tensor``, contiguous, of any shape and dtype; it is kept alive until the end.

        The send starts when the stream that is current now has completed the tensor.

        Args:
            group: that carries it.
            tensor: the caller's; must not change until the task is complete.
            waiter: waits for the operation.
            group_peer: the receiver's rank in ``group``.
            tag: of the message.
            peer: the receiver's rank in the job.
            direction: 0 for forward transfers, 1 for backward ones.
            name: of the task, in errors.
        """

    def receive(
        self,
        group: ProcessGroup,
        tensor: Tensor,
        waiter: Waiter,
        group_peer: int,
        tag: int,
        peer: int,
        direction: int,
        name: str,
    ) -> Task:
        """Receive into ``tensor``, the caller's; arguments as in `send`.

        It is valid after `Task.wait`, on the stream that is current there.
        """

    def all_reduce(
        self,
        group: ProcessGroup,
        slices: Sequence[Tensor],
        waiter: Waiter,
        op: ReduceOp,
        lane: int,
        name: str,
    ) -> Task:
        """All-reduce each of ``slices`` in place: contiguous 1-D views of one buffer, of one dtype.

        They are the caller's, and valid after `Task.wait`. Slices of one ``lane`` (process group)
        start in the order of submission.
        """

    def reduce_scatter(
        self,
        group: ProcessGroup,
        slices: Sequence[tuple[Tensor, Sequence[Tensor]]],
        waiter: Waiter,
        op: ReduceOp,
        lane: int,
        name: str,
    ) -> Task:
        """Reduce-scatter each slice: ``(sum, parts)``, 1-D, of one length and dtype.

        Each rank's ``sum`` becomes the reduction of that rank's entry of ``parts``, one per rank of
        the group. Ownership and validity are as in `all_reduce`.
        """

    def all_gather(
        self,
        group: ProcessGroup,
        slices: Sequence[tuple[Tensor, Sequence[Tensor]]],
        waiter: Waiter,
        lane: int,
        name: str,
    ) -> Task:
        """All-gather each slice: ``(part, parts)``, 1-D, of one length and dtype.

        ``parts`` becomes every rank's ``part``, in the order of the group's ranks. Ownership and
        validity are as in `all_reduce`.
        """

    def announce(self, peer: int, direction: int, eta_s: float) -> None: ...
    def fail(self, error: str) -> None: ...
    def failure(self) -> str: ...
    def shutdown(self, timeout_s: float) -> bool: ...
    def statistics(self) -> Statistics: ...

class ControlLinks:
    """TCP connections to other ranks, for control messages.

    Each is given as (rank, socket, address, port at which the rank listens).
    """

    def __init__(
        self, scheduler: Scheduler, connections: Sequence[tuple[int, int, str, int]]
    ) -> None: ...
    def warnings(self) -> list[str]: ...
    def close(self) -> None: ...
