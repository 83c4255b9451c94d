"""Faults of synchronization, each a small change of our source that a test must notice."""

import functools
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import FunctionType
from typing import Any, Literal

from tests.gpu_path import other_scheduler


@dataclass(frozen=True, slots=True)
class Mutation:
    """One fault.

    Attributes:
        name: what goes wrong.
        place: ``module:function`` or ``module:Class.method`` below ``megatron.fold3d.runtime``, or
            a file of ``csrc``.
        old: a piece of its source that occurs once.
        new: what stands there instead.
        flags: of a run that reaches it.
        more: other pieces of the same source, and what stands there instead.
        late: which streams must be late for it to show.
        num_queues: hardware queues of the device.
    """

    name: str
    place: str
    old: str
    new: str
    flags: str = ""
    more: tuple[tuple[str, str], ...] = ()
    late: Literal["compute", "others"] = "others"
    num_queues: int = 64

    def __str__(self) -> str:
        return self.name

    @property
    def is_cpp(self) -> bool:
        return self.place.endswith(".cpp")

    def change(self, source: str) -> str:
        """Return the source with the fault in it."""
        for old, new in ((self.old, self.new), *self.more):
            assert source.count(old) == 1, f"{self.name}: {self.place} has changed"
            source = source.replace(old, new)
        return source


def build(mutation: Mutation) -> None:
    """Compile what the fault changes, if that is C++, so that no rank has to."""
    if mutation.is_cpp:
        other_scheduler.build(mutation.place, mutation.change)


@contextmanager
def mutate(mutation: Mutation) -> Iterator[None]:
    """Change the source of one function, or of C++, for as long as the context lasts."""
    if mutation.is_cpp:
        other_scheduler.load(other_scheduler.build(mutation.place, mutation.change))
        yield
        return
    module, _, path = mutation.place.partition(":")
    home = import_module(f"megatron.fold3d.runtime.{module}")
    function = _function(functools.reduce(getattr, path.split("."), home))
    source = textwrap.dedent(inspect.getsource(function))
    source = source[source.index("def ") :]  # without its decorators
    names = dict(function.__globals__)
    exec(mutation.change(source), names)
    code, function.__code__ = function.__code__, names[function.__name__].__code__
    try:
        yield
    finally:
        function.__code__ = code


def _function(found: Any) -> FunctionType:
    function = inspect.unwrap(getattr(found, "fget", None) or found)
    assert isinstance(function, FunctionType)
    return function


_PAIRS = "--schedule aiao:pairs=on"
_TO_HOST = "--offload-activations on --lazy-inter-segment"
_SHARE = "--schedule 1f1b:step=next:share=0.5"
_TIED = "--overlap-grad-reduce --clip-grad 0"
_TRACE = "--trace TRACE"
_SHARDS = "--shard-segments gradients"
_EARLY = "--schedule aiao:wgrad=behind"
LANES = "--preemptive-comm --num-experts 2"
FULL_QUEUE = "--preemptive-comm"
_at_its_start = functools.partial(  # a task counts as over when its operations have started
    Mutation,
    place="csrc/scheduler.cpp",
    old="  auto operation = item.operation;\n",
    new="  auto operation = item.operation;\n  auto task = item.task;\n",
    more=(
        ("    });\n  } catch (", "    });\n    task->end_operation();\n  } catch ("),
        ("  flight.item.task->end_operation();\n", ""),
    ),
)

MUTATIONS = (
    # Transfers between pipeline ranks.
    Mutation(
        "a received tensor is used before it has arrived",
        "transfers.p2p:P2P.take",
        "    work.wait()\n",
        "",
    ),
    Mutation(
        "a tensor that is being sent is not kept",
        "transfers.p2p:P2P.send",
        "self._leaving.append((alias, work))",
        "self._leaving.append((None, work))",
    ),
    Mutation(
        "sends are given up as soon as the next one begins",
        "transfers.p2p:P2P.send",
        "or self._oldest_is_sent):\n        self._leaving[0][1].wait()",
        "or len(self._leaving) > 1):\n        pass",
    ),
    Mutation(
        "an iteration ends before its sends",
        "transfers.p2p:P2P.drain",
        "self._leaving[0][1].wait()",
        "pass",
    ),
    Mutation(
        "a tensor that is being sent is let go of right before the end is waited for",
        "transfers.p2p:P2P.drain",
        "        self._leaving[0][1].wait()\n        self._leaving.popleft()",
        "        self._leaving.popleft()[1].wait()",
    ),
    Mutation(
        "receives share a buffer",
        "transfers.p2p:P2P.post",
        "tensor = torch.empty(shape, dtype=dtype, device=self._device)",
        "before = [tensor for tensor, _ in self._arriving.values()]\n"
        "    new = torch.empty(shape, dtype=dtype, device=self._device)\n"
        "    tensor = before[0] if before else new",
    ),
    Mutation(
        "gradients travel in the other direction's group",
        "transfers.p2p:groups_by_op",
        "BACK.send: before[1],",
        "BACK.send: before[0],",
    ),
    Mutation(
        "a send starts ahead of the computation before it",
        "transfers.alternating_p2p:AlternatingP2P._start_send",
        "stream.wait_stream(self._streams.current_stream())",
        "pass",
        late="compute",
        num_queues=1,
    ),
    Mutation(
        "a send reads memory of its stream, which nobody keeps",
        "transfers.alternating_p2p:AlternatingP2P._start_send",
        "P2P._start_send(self, action, tensor)",
        "P2P._start_send(self, action, tensor.clone())",
        num_queues=1,
    ),
    Mutation(
        "a received tensor is memory of another stream, and let go of there",
        "transfers.p2p:P2P.post",
        "tensor = torch.empty(shape, dtype=dtype, device=self._device)",
        "from megatron.fold3d.runtime.device import streams_of\n"
        "    streams = streams_of(self._device)\n"
        "    with streams.stream(streams.Stream()):\n"
        "        tensor = torch.empty(shape, dtype=dtype, device=self._device)",
    ),
    Mutation(
        "the host waits for a received tensor",
        "transfers.p2p:P2P.take",
        "    work.wait()\n",
        "    work.wait()\n    tensor.sum().item()\n",
    ),
    # Copies to host memory and back.
    Mutation(
        "host memory is page-locked when a micro-batch finds no room",
        "offload.pinned_pool:PinnedPool.take",
        "return None",
        "self.reserve({size: 1 + self._slots[size]})",
        _TO_HOST,
    ),
    Mutation(
        "a copy starts ahead of the computation before it",
        "offload.copies:Copies._copy",
        "stream.wait_stream(self._backend.current_stream())",
        "pass",
        _TO_HOST,
        late="compute",
    ),
    Mutation(
        "nothing waits for a copy",
        "offload.copies:Copies.wait",
        "self._backend.current_stream().wait_event(copied)",
        "pass",
        _TO_HOST,
    ),
    Mutation(
        "a copy's event is never recorded",
        "offload.copies:Copies._copy",
        "return self.now()",
        "return self._backend.Event()",
        _TO_HOST,
    ),
    Mutation(
        "a copy's event is recorded before the copy",
        "offload.copies:Copies._copy",
        "        with watch():\n",
        "        early = self.now()\n        with watch():\n",
        _TO_HOST,
        (("return self.now()", "return early"),),
    ),
    Mutation(
        "copies to the device run on another stream than their event",
        "offload.copies:Copies._copy",
        "self._launch(targets[start:end], sources[start:end], stream)",
        "self._launch(targets[start:end], sources[start:end], self._streams[0])",
        _TO_HOST,
    ),
    Mutation(
        "every copy counts as over",
        "transfers.host_link:HostLink._recycle",
        "self._copying[0][0].query()",
        "True",
        _TO_HOST,
    ),
    Mutation(
        "activations leave before they are copied",
        "offload.offloader:Offloader._leave",
        "self.copies.wait(away.copied)",
        "pass",
        _TO_HOST,
    ),
    Mutation(
        "activations leave as soon as their copy begins",
        "offload.offloader:Offloader.offload",
        "self._leaving[-1].append(away)",
        "self._leaving[-1].append(away); away.saved.leave(held)",
        _TO_HOST,
    ),
    Mutation(
        "a backward does not wait for its activations",
        "offload.offloader:Offloader.using",
        "self.copies.wait(away.copied)",
        "pass",
        _TO_HOST,
    ),
    Mutation(
        "host memory is reused while its copy is there",
        "offload.offloader:Offloader.offload",
        "self._leaving[-1].append(away)",
        "self._leaving[-1].append(away); self.pool.give_back(away.slot)",
        _TO_HOST,
    ),
    # Transfers through host memory.
    Mutation(
        "host memory is read before the message is there",
        "transfers.host_link:HostLink._fetch",
        "work.wait()",
        "pass",
        _TO_HOST,
    ),
    Mutation(
        "a tensor is used before it is back on the device",
        "transfers.host_link:HostLink.take",
        "self._copies.wait(copied)",
        "pass",
        _TO_HOST,
    ),
    Mutation(
        "a message's memory is reused before it is on the device",
        "transfers.host_link:HostLink.take",
        "self._copying.append((copied, None, slot))",
        "self.pool.give_back(slot)",
        _TO_HOST,
    ),
    Mutation(
        "a message leaves before it is in host memory",
        "transfers.host_link:HostLink.send",
        "copied.synchronize()",
        "pass",
        _TO_HOST,
    ),
    Mutation(
        "a tensor is not kept until it is in host memory",
        "transfers.host_link:HostLink.send",
        "self._copying.append((copied, source, None))",
        "del source",
        _TO_HOST,
    ),
    Mutation(
        "a message's memory is reused before it has left",
        "transfers.host_link:HostLink.send",
        "self._sends.append((self._sender.submit(deliver), slot))",
        "self._sends.append((self._sender.submit(deliver), slot)); self.pool.give_back(slot)",
        _TO_HOST,
    ),
    # Gradients, in this iteration and the next.
    Mutation(
        "a step does not wait for its gradients",
        "grad_sync.sums:Sums.wait",
        "        work.wait()\n",
        "        pass\n",
        _SHARE,
    ),
    Mutation(
        "what is kept back is not waited for",
        "grad_sync.sums:Sums.finish_kept",
        "        work.wait()\n",
        "        pass\n",
        _TIED,
    ),
    Mutation(
        "the rest of the gradients is never reduced",
        "grad_sync.stage_gradients:StageGradients.take",
        "taken, self._left = self._left, list[Piece]()",
        "taken = list[Piece]()",
        _SHARE,
    ),
    Mutation(
        "an iteration does not wait for DP.sync that started between weight gradients",
        "grad_sync.dp_sync:DPSync.wait",
        "self._in_parts.wait(chunk)",
        "pass",
        _EARLY,
    ),
    # Shards.
    Mutation(
        "backwards do not wait for the second all-gather of their parameters",
        "shard_buffers:ShardBuffers._wait",
        "bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)",
        "pass",
        _SHARDS,
    ),
    Mutation(
        "gradients are added to memory that was allocated again and not zeroed",
        "shard_buffers:ShardBuffers._of_grads",
        "buffer.zero_()",
        "pass",
        _SHARDS,
    ),
    # Times.
    Mutation(
        "a trace reads events that have not passed",
        "trace.recorder:Recorder.flush",
        "any(end is None or end.passed_s is None for end in ends)",
        "any(end is None for end in ends)",
        _TRACE,
        late="compute",
    ),
    Mutation(
        "the end of a collective is a callback, which stops the one queue",
        "device:call_when_done",
        "        watcher_of(device).when(end, "
        "lambda: all(work.is_completed() for work in works), end)\n",
        "        works[0].get_future().add_done_callback(lambda _: end())\n",
        _PAIRS,
        num_queues=1,
    ),
    # Preemption, whose host waits for ends.
    _at_its_start(
        "a wait for slices is over when they have started, and their memory goes to another lane",
        flags=LANES,
    ),
    _at_its_start(
        "a wait for a receive is over when it has started, and the host fills the queue behind it",
        flags=FULL_QUEUE,
    ),
    # Pairs of micro-batches.
    Mutation(
        "a layer does not wait for the collective during which the other micro-batch ran",
        "tensor_parallel.paired_group:_PairedWork.finish",
        "    done = bool(self._work.wait(*timeout))\n",
        "    done = True\n",
        _PAIRS,
    ),
)
