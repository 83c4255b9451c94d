"""The extension that `make extension` builds from ``csrc``."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.futures import Future

class Task:
    """What was submitted; over when all of its operations are."""

    @property
    def name(self) -> str: ...
    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it is over.

        Raises:
            RuntimeError: the job's first failure, with this task's name; or the time is up.
        """

    def is_completed(self) -> bool: ...
    def get_future(self) -> Future[None]:
        """Return what is complete when all of it has ended, well or not."""

class Waiter:
    """A thread that waits for operations of one kind, in order; it runs while there are any."""

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
    ) -> Task: ...
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
    ) -> Task: ...
    def all_reduce(
        self,
        group: ProcessGroup,
        slices: Sequence[Tensor],
        waiter: Waiter,
        op: ReduceOp,
        lane: int,
        name: str,
    ) -> Task: ...
    def reduce_scatter(
        self,
        group: ProcessGroup,
        slices: Sequence[tuple[Tensor, Sequence[Tensor]]],
        waiter: Waiter,
        op: ReduceOp,
        lane: int,
        name: str,
    ) -> Task:
        """Sum each slice's tensors, one per rank, each into its rank's first."""

    def all_gather(
        self,
        group: ProcessGroup,
        slices: Sequence[tuple[Tensor, Sequence[Tensor]]],
        waiter: Waiter,
        lane: int,
        name: str,
    ) -> Task:
        """Collect each slice's first tensor, of all ranks, in the others."""

    def announce(self, peer: int, direction: int, eta_s: float) -> None: ...
    def fail(self, error: str) -> None: ...
    def failure(self) -> str: ...
    def shutdown(self, timeout_s: float) -> bool: ...
    def statistics(self) -> Statistics: ...

class ControlLinks:
    """Connections to other ranks, given as (rank, socket, address, port where the rank listens)."""

    def __init__(
        self, scheduler: Scheduler, connections: Sequence[tuple[int, int, str, int]]
    ) -> None: ...
    def warnings(self) -> list[str]: ...
    def close(self) -> None: ...
