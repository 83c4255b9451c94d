"""``--preemptive-comm``: the communicator as a feature of the executor."""

from datetime import timedelta

from megatron.fold3d.runtime.feature import Feature, Iteration
from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator
from megatron.fold3d.runtime.preemption.route_buckets import neighbours, route_buckets


class Preemption(Feature):
    """Connects, routes and closes the communicator; outlives all features that communicate.

    Args:
        communicator: the communicator that transfers and gradient sync use.
        timeout: the timeout of a collective.
    """

    def __init__(self, communicator: PreemptiveCommunicator, timeout: timedelta) -> None:
        self._communicator = communicator
        self._timeout = timeout
        self._is_connected = False

    def prepare(self, iteration: Iteration) -> None:
        """Connect to the neighbours in the first iteration; route the model's buckets."""
        if not self._is_connected:
            self._is_connected = True
            self._communicator.connect(neighbours(iteration.pp_group, iteration.chunks))
            self._communicator.fit_slices(
                iteration.hidden_bytes, iteration.groups.dp_cp, iteration.device
            )
        if iteration.trains:
            route_buckets(iteration.chunks, self._communicator, self._timeout)

    def drain(self, iteration: Iteration) -> None:
        """Log the communicator's non-fatal failures."""
        self._communicator.check()

    def close(self, error: BaseException | None) -> None:
        """Let communication in flight finish; after an error, notify all ranks instead."""
        self._communicator.close(error)
