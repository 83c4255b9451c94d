"""``pairs=on``: pairs of micro-batches as a feature of the executor.

The handler of a pair's first action does nothing; that of the second runs both. In the program the
two are adjacent, so every action that needs the first one's result follows the second.
"""

from collections.abc import Callable
from functools import partial

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.passes.pairs import PAIRED_OPS, pairs, second_of
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration, note_place
from megatron.fold3d.runtime.tensor_parallel.baton import Baton


class PairedMicrobatches(Feature):
    """Runs the pairs of a program with a baton.

    Args:
        baton: the baton that the tensor-parallel process group hands over.
        hooks_reduce: whether DDP's hooks reduce gradients inside a stage's last backward.
    """

    def __init__(self, baton: Baton, *, hooks_reduce: bool) -> None:
        self._baton = baton
        self._hooks_reduce = hooks_reduce

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return handlers that run pairs; evaluation has none."""
        if not iteration.trains:
            return {}
        first = pairs(iteration.program, hooks_reduce=self._hooks_reduce)
        second = frozenset(map(second_of, first))

        def paired(op: Op) -> Handler:
            run = inner[op]
            waiting: list[Action] = []

            def handler(action: Action) -> None:
                if action in first:
                    waiting.append(action)
                elif action in second:
                    self._baton.run(
                        _placed(run, waiting.pop(), iteration.rank),
                        _placed(run, action, iteration.rank),
                        iteration.device,
                    )
                else:
                    run(action)

            return handler

        return {op: paired(op) for op in PAIRED_OPS}

    def close(self, error: BaseException | None) -> None:
        """End the thread of second micro-batches."""
        self._baton.close()


def _placed(run: Handler, action: Action, rank: int) -> Callable[[], None]:
    """Return a function that runs an action; an error says which of the two it was."""

    def run_action(action: Action) -> None:
        try:
            run(action)
        except Exception as error:
            note_place(error, rank, action)
            raise

    return partial(run_action, action)
