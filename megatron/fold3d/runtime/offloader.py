"""Saved activations in host memory while no computation wants them (paper Sec. IV, offloader).

The plan says when: a micro-batch's activations leave at its OFFLOAD, while the next computation
runs, and come back at its RELOAD, computations before its backward.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Self

import torch

from megatron.fold3d.config import Fold3DConfig
from megatron.fold3d.plan.ir import COMPUTE_OPS, Action, Op, Program
from megatron.fold3d.plan.verify import peak_on_host
from megatron.fold3d.runtime.copies import Copies
from megatron.fold3d.runtime.device import free_device_bytes
from megatron.fold3d.runtime.offload_choice import Measured, Meter, choose
from megatron.fold3d.runtime.pinned_pool import ALIGNMENT, PinnedPool, Slot
from megatron.fold3d.runtime.recorder import Recorder, never
from megatron.fold3d.runtime.saved_tensors import SavedTensors, offsets

logger = logging.getLogger(__name__)

_SMALL = 16  # a hidden state divided by this is too small to offload
_Key = tuple[int, int | None]  # stage, micro-batch


class Offloader:
    """Moves what forwards save between the device and a pool of host memory.

    Args:
        device: where the model is.
        everything: offload every large tensor that a forward saves; otherwise only what
            recomputation starts from, which `checkpoint` marks.
        sparing: once two iterations have shown what that takes, offload no more than needed.
        copies: the copy engine, one of its own by default.

    Attributes:
        pool: the host memory.
        copies: the copy engine.
        held: activations on the device now, offloaded or not, as `peak_activations` counts them.
        peak: the most there ever were in this iteration.
        num_reloads: activations that came back so far.
        num_early: of these, those that were there before their backward began.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        everything: bool,
        sparing: bool = False,
        copies: Copies | None = None,
    ) -> None:
        self.pool = PinnedPool(device)
        self.copies = copies or Copies(device)
        self.held = self.peak = self.num_reloads = self.num_early = 0
        self._device = device
        self._everything = everything
        self._meter = Meter(device) if sparing else None
        self._measured: Measured | None = None
        self._chosen: dict[int, int] = {}  # by the number of computations of an iteration
        self._num_iterations = 0
        self._recorder = never(device)
        self._bytes_of_stage: dict[int, int] = {}
        self._travels: frozenset[_Key] = frozenset()
        self._program: Program = ()
        self._lasting: frozenset[int] = frozenset()
        self._smallest_bytes = 0
        self._collecting: SavedTensors | None = None
        self._away: dict[_Key, _Away] = {}
        self._leaving: deque[_Away] = deque()

    @classmethod
    def of(cls, config: Fold3DConfig) -> Self:
        """Return the offloader of a run."""
        return cls(
            torch.device(config.device),
            everything=config.offload_everything,
            sparing=config.offload_activations == "auto",
        )

    def at_most(self, program: Program) -> int | None:
        """Return how many activations of a program should leave; None is all."""
        if self._meter is not None and self._num_iterations > 1:
            self._measure(self._meter)
        if self._measured is None:
            return None
        computations = tuple(action for action in program if action.op in COMPUTE_OPS)
        if len(computations) not in self._chosen:
            self._chosen[len(computations)] = choose(computations, self._measured)
        return self._chosen[len(computations)]

    def begin(
        self,
        program: Program,
        modules: Iterable[torch.nn.Module],
        hidden_bytes: int,
        recorder: Recorder | None = None,
    ) -> None:
        """Prepare for an iteration.

        Args:
            program: of this rank.
            modules: their parameters and buffers stay.
            hidden_bytes: of one hidden state; tensors that are much smaller stay.
            recorder: is told of copies.

        Raises:
            HostMemoryError: the host has less memory than the program takes.
        """
        self.held = self.peak = 0
        self._num_iterations += 1
        self._recorder = recorder or self._recorder
        if self._meter is not None:
            self._meter.clear()
        self._away.clear()
        self._program = program
        self._travels = frozenset((a.stage, a.microbatch) for a in program if a.op is Op.OFFLOAD)
        self._smallest_bytes = hidden_bytes // _SMALL
        self._lasting = frozenset(
            tensor.untyped_storage().data_ptr()
            for module in modules
            # Megatron's DDP has other things under the name `buffers`.
            for tensor in chain(module.parameters(), torch.nn.Module.buffers(module))
        )
        self.pool.reserve(peak_on_host(program, self._bytes_of_stage))

    @contextmanager
    def saving(self, forward: Action) -> Iterator[None]:
        """Collect what the forward inside saves, if the plan offloads it."""
        self._hold()
        over = self._watch(forward)
        key = forward.stage, forward.microbatch
        if key in self._travels:
            saved = SavedTensors(self._device, self._smallest_bytes, self._lasting)
            self._away[key] = _Away(saved)
            self._collecting = saved
            with saved.hooks() if self._everything else nullcontext():
                yield
            self._collecting = None
        else:
            yield
        over()
        self._release()

    def checkpoint(self) -> AbstractContextManager[Any]:
        """Collect what the recomputation inside saves: its inputs."""
        if self._collecting is None or self._everything:
            return nullcontext()
        return self._collecting.hooks()

    def offload(self, action: Action, held: torch.Tensor | None) -> None:
        """Start to copy to the host; the device's memory is free after the next computation.

        Args:
            action: what leaves.
            held: the stage's input tensor, which the schedule keeps for its gradient alone.

        Raises:
            HostMemoryError: the host has no memory left for it.
        """
        away = self._away[action.stage, action.microbatch]
        sources = away.saved.flat()
        bounds = offsets([source.numel() for source in sources])
        num_bytes = max(bounds[-1], ALIGNMENT)  # a slot even where nothing is large enough
        self._learn(action.stage, num_bytes)
        away.num_bytes, away.held = num_bytes, held
        away.slot = self.pool.take(num_bytes)
        targets = [
            away.slot.memory[begin : begin + source.numel()]
            for source, begin in zip(sources, bounds[:-1], strict=True)
        ]
        away.copied = self.copies.to_host(targets, sources, lambda: self._watch(action, "offload"))
        self._leaving.append(away)

    def reload(self, action: Action) -> None:
        """Start to copy back."""
        away = self._away[action.stage, action.microbatch]
        assert away.slot is not None  # the verifier has seen its OFFLOAD
        self._hold()
        away.buffer = torch.empty(away.num_bytes, dtype=torch.uint8, device=self._device)
        away.copied = self.copies.to_device(
            [away.buffer],
            [away.slot.memory[: away.num_bytes]],
            lambda: self._watch(action, "offload"),
        )

    @contextmanager
    def using(self, backward: Action) -> Iterator[None]:
        """Let the backward inside have what came back for it."""
        away = self._away.pop((backward.stage, backward.microbatch), None)
        if away is not None:
            assert away.buffer is not None  # the verifier has seen its RELOAD
            self.num_reloads += 1
            self.num_early += self.copies.is_over(away.copied)
            self.copies.wait(away.copied)
            away.saved.restore(away.buffer)
            if away.slot is not None:
                self.pool.give_back(away.slot)
            del away
        over = self._watch(backward)
        yield
        over()
        self.held -= 1
        self._release()

    def _release(self) -> None:
        """Free what left before the computation that was issued just now."""
        while self._leaving:
            away = self._leaving.popleft()
            self.copies.wait(away.copied)
            away.saved.leave(away.held)
            self.held -= 1

    def _watch(self, action: Action, kind: str | None = None) -> Callable[[], None]:
        """Note when an action begins; call what is returned when it is over."""
        ends = []
        if self._meter is not None and self._measured is None:
            ends.append(self._meter.begin(action.op))
        if kind is not None:
            ends.append(self._recorder.begin(action, kind))

        def over() -> None:
            for end in ends:
                end()

        return over

    def _measure(self, meter: Meter) -> None:
        means_s = meter.means_s()
        if self._measured is None and means_s is not None:
            self._measured = Measured(
                max(self._bytes_of_stage.values()), free_device_bytes(self._device), *means_s
            )
            logger.info("offload: measured %s", self._measured)

    def _hold(self) -> None:
        self.held += 1
        self.peak = max(self.peak, self.held)

    def _learn(self, stage: int, num_bytes: int) -> None:
        """Get the slots of a stage at once when its first micro-batch shows their size."""
        if self._bytes_of_stage.get(stage, 0) < num_bytes:
            self._bytes_of_stage[stage] = num_bytes
            self.pool.reserve(peak_on_host(self._program, self._bytes_of_stage))


class _Away:
    """Activations that leave, are on the host, or come back."""

    __slots__ = ("buffer", "copied", "held", "num_bytes", "saved", "slot")

    def __init__(self, saved: SavedTensors) -> None:
        self.saved = saved
        self.held: torch.Tensor | None = None
        self.num_bytes = 0
        self.slot: Slot | None = None
        self.buffer: torch.Tensor | None = None
        self.copied: Any = None
