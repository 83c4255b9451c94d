"""Links between switches, and which of them each flow of a simulation takes.

A simulated rank stands for all nodes that hold the same part of the model. They are alike: what one
of them sends through a switch, the others send through that one or through another that carries
the same. So a link here stands for all links with the same load, and a use of it says how many
equal flows there are on one of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Use(NamedTuple):
    """A link on the way of a flow."""

    link: int
    flows: int
    """How many flows that are equal to this one share the link."""


@dataclass(frozen=True, slots=True)
class Routes:
    """What flows use beside NICs. Without any link, nothing is scarcer than a NIC."""

    capacities: tuple[float, ...] = ()
    """Of each link in one direction, in NICs of a node."""
    of_message: Mapping[tuple[int, int], tuple[Use, ...]] = field(default_factory=dict)
    """By sending and receiving rank of the pipeline."""
    of_collective: Mapping[int, tuple[Use, ...]] = field(default_factory=dict)
    """Of a rank's DP.sync."""

    def message(self, sender: int, receiver: int) -> tuple[Use, ...]:
        """Return the links of a message from rank to rank."""
        return self.of_message.get((sender, receiver), ())

    def collective(self, rank: int) -> tuple[Use, ...]:
        """Return the links of a rank's DP.sync."""
        return self.of_collective.get(rank, ())


NO_SWITCHES = Routes()
