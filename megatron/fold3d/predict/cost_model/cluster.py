"""Clusters as data: a node's GPUs, memory and NICs, and the network between nodes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.fold3d.observe.fields import check_fields, from_file, is_file_name, is_number
from megatron.fold3d.policy.grad_sync_cuts import RING_BUFFER_BYTES

GIGA = 1e9
USABLE_MEMORY = 0.85
"""Share of a GPU's memory for a run; CUDA, NCCL and fragmentation take the rest."""
_MOST_GPUS = 1_000_000
_LEAST = 1e6  # bytes, or bytes a second; a smaller number was written in giga or mega


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Identical nodes; rates are nominal, and an efficiency is the part of a rate achieved."""

    name: str
    num_nodes: int
    gpus_per_node: int
    gpu_flops_per_s: float
    gpu_memory_bytes: float
    nic_bytes_per_s: float
    """Rate of all NICs of a node together, in one direction."""
    intra_bytes_per_s: float
    """Rate between two GPUs of a node, in one direction."""
    host_copy_bytes_per_s: float
    """Rate between all GPUs of a node and the host's memory, in one direction."""
    host_memory_bytes: float
    nics: int = 1
    """NICs of a node. If GPUs share several NICs, a ring over more than one GPU of a node enters
    and leaves the node through one NIC."""
    nic_latency_s: float = 10e-6
    compute_efficiency: float = 0.45
    """For all computation; with `memory_bytes_per_s`, for large matrix products alone."""
    nic_efficiency: float = 0.65
    task_overhead_s: float = 0.0
    """Overhead of starting one forward or backward of a model chunk, beside its computation."""

    send_buffer_bytes: float = 0.0
    """A message up to this size does not block its sender: TCP's buffers hold it."""
    ring_buffer_bytes: float = RING_BUFFER_BYTES["nccl"]
    """A message up to this size slows a ring down in its own direction alone."""
    iteration_overhead_s: float = 0.0
    """Overhead of an iteration beside its actions: the optimizer's step, data, logs."""
    switch_nodes: tuple[int, ...] = ()
    """Nodes below a switch, for each level of switches from the lowest; neighbours share one."""
    oversubscription: tuple[float, ...] = ()
    """For each level: a switch's bandwidth to the nodes below, divided by the bandwidth upward."""
    straggler_sigma: float = 0.0
    """Standard deviation of GPUs' times for the same computation, divided by the mean time."""
    memory_bytes_per_s: float = 0.0
    """Rate between a GPU and its memory; zero means one efficiency for layers of all sizes."""
    multiprocessors: int = 108
    """Streaming multiprocessors of a GPU."""
    layer_efficiencies: tuple[tuple[float, ...], ...] = ()
    """Rows of measurements: micro-batch, sequence, hidden size, tp, and the part achieved."""
    has_bf16: bool = True
    """Whether GPUs train in bf16; otherwise in fp16."""
    is_blackwell: bool = False
    """Before Blackwell Megatron demands one hardware queue for tensor parallelism."""

    def __post_init__(self) -> None:
        check_fields(self, may_be_zero=("nic_latency_s", "ring_buffer_bytes"))
        if self.num_gpus > _MOST_GPUS:
            raise ValueError(f"found {self.num_gpus} GPUs; give {_MOST_GPUS} at most")
        for field in fields(self):
            value, is_rate = getattr(self, field.name), field.name.endswith("_per_s")
            if (is_rate or field.name.endswith("_memory_bytes")) and 0 < value < _LEAST:
                unit = "bytes" if "bytes" in field.name else "FLOP"
                raise ValueError(
                    f"found {field.name}={value:g}; it is in {unit}: give {value:g}e9 if you mean "
                    f"giga{unit}"
                )
        for name in ("compute_efficiency", "nic_efficiency"):
            if (value := getattr(self, name)) > 1:
                raise ValueError(f"found {name}={value}; an efficiency is in (0, 1]")
        self._check_switches()
        self._check_layers()

    def _check_layers(self) -> None:
        rows: Any = self.layer_efficiencies
        if not isinstance(rows, tuple | list) or not all(
            isinstance(row, tuple | list) and len(row) == 5 and all(is_number(n) for n in row)
            for row in rows
        ):
            raise ValueError(
                f"found layer_efficiencies={rows!r}; it is a list of rows such as "
                "[1, 2048, 4096, 8, 0.4]: micro-batch, sequence, hidden size, tp, and the part of "
                "gpu_flops_per_s that such a layer achieves; drop it, or let fold3d doctor "
                "--write-cluster measure it"
            )
        for row in rows:
            if min(row) <= 0 or row[4] > 1:
                raise ValueError(
                    f"found layer_efficiencies with {list(row)}; sizes are above zero, and an "
                    "efficiency is in (0, 1]; measure again with fold3d doctor --write-cluster"
                )
        object.__setattr__(self, "layer_efficiencies", tuple(map(tuple, rows)))

    def _check_switches(self) -> None:
        for name, whole in (("switch_nodes", True), ("oversubscription", False)):
            values = getattr(self, name)
            if not isinstance(values, tuple | list) or not all(
                is_number(n) and n >= 1 and (not whole or isinstance(n, int)) for n in values
            ):
                rule = "whole numbers" if whole else "numbers"
                raise ValueError(f"found {name}={values!r}; it is a list of {rule} from 1 on")
            object.__setattr__(self, name, tuple(values))  # files hold lists
        if len(self.switch_nodes) != len(self.oversubscription):
            raise ValueError(
                f"found {len(self.switch_nodes)} switch_nodes and {len(self.oversubscription)} "
                "oversubscription; each level of switches has one of both"
            )
        for below, above in pairwise(self.switch_nodes):
            if above % below or above == below:
                raise ValueError(
                    f"found switch_nodes={list(self.switch_nodes)}; each is a multiple of the one "
                    "before, since a switch has whole switches below it"
                )

    @property
    def usable_bytes(self) -> float:
        """Bytes of a GPU's memory that a run may hold."""
        return self.gpu_memory_bytes * USABLE_MEMORY

    def remark_on_memory(self, held_bytes: Sequence[float]) -> str:
        """Return what to say of the memory that pipeline ranks hold; nothing if enough is left.

        Raises:
            ValueError: a rank would hold more than a GPU has.
        """
        most, limit = max(held_bytes), self.gpu_memory_bytes
        if most > limit:
            raise ValueError(
                f"pipeline rank {held_bytes.index(most)} would hold {most / 2**30:.1f} GiB, and a "
                f"GPU of {self.name} has {limit / 2**30:.0f}; `fold3d search` finds sizes that fit"
            )
        if most > self.usable_bytes:
            return f"little is left of {limit / 2**30:.0f} GiB for CUDA, NCCL and the allocator"
        return ""

    @property
    def usable_host_bytes(self) -> float:
        """Bytes of the host's memory that one GPU's offloaded activations may take."""
        return self.host_memory_bytes * USABLE_MEMORY / self.gpus_per_node

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def goodput_bytes_per_s(self) -> float:
        """The bandwidth that collectives and messages achieve over all NICs of a node."""
        return self.nic_bytes_per_s * self.nic_efficiency


_NODES = """
           GPUs TFLOP/s GiB   NVLink GB/s   NIC Gb/s   host GB/s   host GB   memory GB/s   SMs
v100          8     125  32           150        100        13.6      1200           900    80
a100          8     312  40           300        200        29.6      2000          1555   108
a100-80g      8     312  80           300       1600       100        2000          2039   108
h100          8     989  80           450       3200       200        2000          3350   132
h200          8     989 141           450       3200       200        2000          4800   132
perlmutter    4     312  40           300        800       100         256          1555   108
p3dn          8     125  32           150        100        13.6       824           900    80
p4d           8     312  40           300        400        29.6      1237          1555   108
dgx-a100      8     312  80           300       1600       100        2000          2039   108
dgx-h100      8     989  80           450       3200       200        2000          3350   132
b200          8    2250 180           900       3200       200        2000          8000   148
rtx3090       4      71  24            12        100        24          96           936    82
"""
# v100 and a100: FOLD3D Sec. VI, with its measured copy rates; a100-80g: Megatron Sec. 5;
# perlmutter: AxoNN Sec. VI; rtx3090: Merak Sec. 6.1; the others: their vendors' data sheets. The
# copy rates of p3dn and p4d are assumed equal to v100 and a100, and of b200 equal to h100.


def _node(row: str) -> Cluster:
    name, *numbers = row.split()
    gpus, tera_flops, gib, intra, gigabits, to_host, host, memory, count = map(float, numbers)
    is_volta = name in ("v100", "p3dn")
    return Cluster(
        name=name,
        num_nodes=1,
        gpus_per_node=int(gpus),
        gpu_flops_per_s=tera_flops * 1e12,
        gpu_memory_bytes=gib * 2**30,
        intra_bytes_per_s=intra * GIGA,
        nic_bytes_per_s=gigabits / 8 * GIGA,
        host_copy_bytes_per_s=to_host * GIGA,
        host_memory_bytes=host * GIGA,
        memory_bytes_per_s=memory * GIGA,
        multiprocessors=int(count),
        compute_efficiency=0.66 if is_volta else 0.79,  # see `efficiency`
        has_bf16=not is_volta,
        is_blackwell=name == "b200",
    )


NODES = {node.name: node for node in map(_node, _NODES.strip().splitlines()[1:])}
"""One node of each kind; `cluster` makes clusters of them."""

# Meta, "The Llama 3 Herd of Models" (2024), Sec. 3.3: 400 Gb/s for each GPU; pods of 384 nodes
# with a seventh of their bandwidth between them.
NODES["llama3-h100"] = replace(
    NODES["h100"],
    name="llama3-h100",
    switch_nodes=(384,),
    oversubscription=(7.0,),
)

# scripts/bench/compare.py's host, with one rank. A layer of the model `testbed` takes 6 ms forward
# there (`--layer-forward-s` gives another time); `testbedx4-0.1g` is for 100 Mb/s. Headers take 2%
# of the link. gloo's sends of up to 128 KiB ended within 0.2 ms.
NODES["testbed"] = Cluster(
    name="testbed",
    num_nodes=1,
    gpus_per_node=1,
    gpu_flops_per_s=51_380_224 / 6e-3,
    compute_efficiency=1.0,
    gpu_memory_bytes=4 * 2**30,
    intra_bytes_per_s=GIGA,
    nic_bytes_per_s=200e6 / 8,
    nic_efficiency=0.98,
    nic_latency_s=100e-6,
    send_buffer_bytes=128 * 1024,
    ring_buffer_bytes=RING_BUFFER_BYTES["gloo"],
    host_copy_bytes_per_s=GIGA,
    host_memory_bytes=16 * GIGA,
)

_NAME = re.compile(
    r"(?P<node>[a-z0-9-]+?)x(?P<gpus>\d+)(?:-(?:(?P<nics>\d+)x)?(?P<gigabits>\d+(\.\d+)?)g)?"
)
_TCP_GIGABITS, _TCP_SHARE = 10, 1448 / 1538  # up to here the link is the limit, less all headers


def cluster(name: str) -> Cluster:
    """Return a cluster by its name, ``<node>x<gpus>[-<Gb/s per node>g]``, or from a file.

    ``a100x128-200g`` is 16 nodes of 8 A100 with 200 Gb/s each, ``a100x128-4x200g`` has four such
    NICs in each node. A JSON or TOML file has the fields of `Cluster`.

    Raises:
        ValueError: the name or the file does not describe a cluster, or GPUs do not fill nodes.
    """
    if is_file_name(name):
        return from_file(Path(name), Cluster, "cluster")
    match = _NAME.fullmatch(name.lower())
    if match is None or match["node"] not in NODES:
        raise ValueError(
            f"unknown cluster {name!r}; write <node>x<gpus>-<Gb/s>g such as a100x128-200g with a "
            f"node of {', '.join(sorted(NODES))}, or name a .json or .toml file"
        )
    node, num_gpus = NODES[match["node"]], int(match["gpus"])
    per_node = min(num_gpus, node.gpus_per_node)
    if num_gpus < 1 or num_gpus % per_node:
        raise ValueError(
            f"{num_gpus} GPUs do not fill nodes of {node.gpus_per_node}; "
            f"try {max(1, round(num_gpus / node.gpus_per_node)) * node.gpus_per_node}"
        )
    found = replace(node, name=match[0], num_nodes=num_gpus // per_node, gpus_per_node=per_node)
    if match["gigabits"] is None:
        return found
    nics, gigabits = int(match["nics"] or 1), float(match["gigabits"])
    reached = max(node.nic_efficiency, _TCP_SHARE if gigabits <= _TCP_GIGABITS else 0)
    rate = nics * gigabits / 8 * GIGA
    return replace(found, nics=nics, nic_bytes_per_s=rate, nic_efficiency=reached)
