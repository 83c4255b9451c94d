"""``--preemptive-comm``: what the communicator does in an iteration beside its groups' calls."""

from datetime import timedelta

from megatron.fold3d.runtime.feature import Feature, Iteration
from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator
from megatron.fold3d.runtime.preemption.route_buckets import neighbours, route_buckets


class Preemption(Feature):
    """The communicator's part in an iteration; it outlives all features that communicate.

    Args:
        communicator: that transfers and gradient sync use.
        timeout: of a collective.
        traffic_class: marks the packets of DP.sync.
    """

    def __init__(
        self, communicator: PreemptiveCommunicator, timeout: timedelta, traffic_class: int | None
    ) -> None:
        self._communicator = communicator
        self._timeout = timeout
        self._traffic_class = traffic_class
        self._is_connected = False

    def prepare(self, iteration: Iteration) -> None:
        """Reach the neighbours in the first iteration; take over the buckets of the model."""
        if not self._is_connected:
            self._is_connected = True
            self._communicator.connect(neighbours(iteration.pp_group, iteration.chunks))
            self._communicator.fit_slices(
                iteration.hidden_bytes, iteration.groups.dp_cp, iteration.device
            )
        if iteration.trains:
            route_buckets(iteration.chunks, self._communicator, self._timeout, self._traffic_class)

    def drain(self, iteration: Iteration) -> None:
        """Log what went wrong on the way without ending the job."""
        self._communicator.check()

    def close(self, error: BaseException | None) -> None:
        """Let what runs end, or tell all ranks of the error."""
        self._communicator.close(error)
