"""The events of an iteration, which features report to the recorder of a trace.

Keeps one invariant: a run without a trace loads no recorder. Its features report to `UNHEARD`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatron.fold3d.plan.ir import Action

if TYPE_CHECKING:
    from megatron.fold3d.runtime.device import Launched


class Events:
    """The events of this rank. This class drops them; its subclass `Recorder` keeps them.

    Attributes:
        running: the action that the executor runs, if its handlers need its name.
    """

    running: Action | None = None

    @contextmanager
    def span(self, name: object, kind: str) -> Iterator[None]:
        """Record a block, from begin to end on the current stream."""
        end = self.open_span(name, kind)
        try:
            yield
        finally:
            end()

    def open_span(self, name: object, kind: str) -> Callable[[], None]:
        """Begin an event on the current stream; call the returned function at its end."""
        return no_end

    def count(self, name: str, amount: float) -> None:
        """Add ``amount`` to one of the iteration's counters."""

    def collective(
        self, name: object, kind: str, launch: "Callable[[], Sequence[Launched]]"
    ) -> "tuple[Sequence[Launched], Callable[[], None]]":
        """Record a collective from its launch until it is done, without waiting.

        Args:
            launch: starts the collective; returns its works in flight, or nothing if it is done.

        Returns:
            The works, and a function to call after the wait for them. It ends the event if the
            works cannot report their own end.
        """
        return launch(), no_end


def no_end() -> None:
    """Do nothing: the end of an event that is not recorded."""


UNHEARD = Events()
"""Events of a run without a trace."""
