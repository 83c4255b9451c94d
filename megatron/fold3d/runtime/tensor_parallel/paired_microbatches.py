"""``pairs=on``: pairs of micro-batches as a feature of the executor.

Only the handler of a chain's last action does something: it runs all actions of the chain on two
sides. Each side takes the next action of the program: a transfer, a copy, or a computation, within
which the side hands over. So a rank starts its actions in the order of its program.
"""

from collections import deque
from itertools import chain

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.plan.ops import COPY_OPS, P2P_OPS
from megatron.fold3d.plan.passes.pairs import PAIRED_OPS, chains
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration, note_place
from megatron.fold3d.runtime.tensor_parallel.baton import Baton


class PairedMicrobatches(Feature):
    """Runs the chains of a program with the baton that the process groups of layers hand over."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that run chains; evaluation has none."""
        if not iteration.trains:
            return {}
        by_last = {of_chain[-1]: of_chain for of_chain in chains(iteration.program)}
        chained = frozenset(chain.from_iterable(by_last.values()))

        def run(action: Action) -> None:
            try:
                inner[action.op](action)
            except Exception as error:
                note_place(error, iteration.rank, action)
                raise

        def handler(action: Action) -> None:
            if action in by_last:
                left = deque(by_last[action])

                def side() -> None:
                    while left:
                        run(left.popleft())

                self._baton.run(side, side, iteration.device)
            elif action not in chained:
                run(action)

        return dict.fromkeys(PAIRED_OPS | P2P_OPS | COPY_OPS, handler)

    def close(self, error: BaseException | None) -> None:
        """End the thread of second micro-batches."""
        self._baton.close()
