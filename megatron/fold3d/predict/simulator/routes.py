"""Links between switches, and which of them each flow of a simulation takes.

A simulated rank represents all nodes that hold the same part of the model. These nodes send the
same amounts through the same switches, or through other switches with the same load. So a link here
represents all links with the same load, and a `Use` says how many equal flows are on one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Use(NamedTuple):
    """A link that a flow takes."""

    link: int
    flows: int
    """How many flows that are equal to this one share the link."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The links that flows use in addition to NICs; none if no link is scarcer than a NIC."""

    capacities: tuple[float, ...] = ()
    """Bandwidth of each link in one direction, relative to the NICs of a node."""
    of_message: Mapping[tuple[int, int], tuple[Use, ...]] = field(default_factory=dict)
    """The links of messages, by sending and receiving pipeline rank."""
    of_collective: Mapping[int, tuple[Use, ...]] = field(default_factory=dict)
    """The links of each rank's DP.sync."""

    def message(self, sender: int, receiver: int) -> tuple[Use, ...]:
        """Return the links of a message from rank to rank."""
        return self.of_message.get((sender, receiver), ())

    def collective(self, rank: int) -> tuple[Use, ...]:
        """Return the links of a rank's DP.sync."""
        return self.of_collective.get(rank, ())


NO_SWITCHES = Routes()
