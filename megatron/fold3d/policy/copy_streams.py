"""The two copy streams of a rank, one for each direction: when a copy starts and ends.

The choice of offload and the simulator use the same rules.
"""

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.plan.ops import COPY_OPS, TABLE, Place

_Key = tuple[int, int | None]  # stage, micro-batch


class CopyStreams:
    """The streams of one rank.

    All times are seconds from one arbitrary origin. If streams share hardware queues, the rules of
    `megatron.fold3d.plan.device_queues` apply as well.

    compute     F0        F1        F2        ...  B1        B0
    to host        [OFFLOAD0 ][OFFLOAD1 ]
    to device                                 [RELOAD1 ][RELOAD0 ]
    """

    def __init__(self) -> None:
        self._free_s = dict.fromkeys(COPY_OPS, 0.0)  # when a stream's last copy ends
        self._on_host_s: dict[_Key, float] = {}  # when an activation's last OFFLOAD ends

    def start_copy(self, copy: Action, now_s: float, seconds: float) -> float:
        """Return when a copy starts that is issued at ``now_s`` and takes ``seconds``.

        A copy starts when the earlier copies on its stream have ended. A RELOAD starts no earlier
        than the end of its activation's OFFLOAD.
        """
        stage, op, microbatch = copy
        start_s = max(now_s, self._free_s[op])
        leaves = TABLE[op].place is Place.TO_HOST
        if not leaves:
            start_s = max(start_s, self._on_host_s.get((stage, microbatch), 0.0))
        end_s = self._free_s[op] = start_s + seconds
        if leaves:
            self._on_host_s[stage, microbatch] = end_s
        return start_s
