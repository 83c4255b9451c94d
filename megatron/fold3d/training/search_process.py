"""A run's search in a process of its own: ranks go on training, and none of them waits for it.

``python -m megatron.fold3d.training.search_process PARENT`` reads the arguments of
`measured_search.predictions` from its standard input and writes what that returns, both pickled.
It ends with its parent.
"""

import logging
import os
import pickle
import subprocess
import sys
from math import inf
from tempfile import TemporaryFile
from typing import Any

from megatron.fold3d.policy.predicted import Predicted, Predictions
from megatron.fold3d.training.leaving import end_with_parent

logger = logging.getLogger(__name__)

_MODULE = "megatron.fold3d.training.search_process"


class SearchProcess:
    """A search that has begun.

    Args:
        question: the arguments of `measured_search.predictions`.
    """

    def __init__(self, **question: Any) -> None:
        self._first = Predicted(job=question["job"], seconds=inf)
        # Not a pipe, which would be full before it is read; `close` closes it.
        self._answer = TemporaryFile()  # noqa: SIM115
        with TemporaryFile() as file:
            pickle.dump(question, file)
            file.seek(0)
            command = [sys.executable, "-m", _MODULE, str(os.getpid())]
            self._process = subprocess.Popen(command, stdin=file, stdout=self._answer)

    def answer(self) -> Predictions | None:
        """Return what is predicted, the first choice alone if it failed; None while it goes on."""
        status = self._process.poll()
        if status is None:
            return None
        if status:
            logger.warning("the search of choices has failed (%s): none is tried", status)
            return Predictions([self._first])
        self._answer.seek(0)
        found: Predictions = pickle.load(self._answer)
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._answer.close()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    from megatron.fold3d.predict.search.measured_search import predictions  # no rank needs it

    pickle.dump(predictions(**pickle.load(sys.stdin.buffer)), sys.stdout.buffer)
