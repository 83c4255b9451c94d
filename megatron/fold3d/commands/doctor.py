"""``fold3d doctor``: is this installation ready to train, and what to fix."""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, median_high
from typing import Any

from megatron.fold3d.commands.console import OK, REJECTED, complain, table, write
from megatron.fold3d.commands.installation import Finding, installation

EXAMPLE = "torchrun --nproc-per-node 8 --no-python fold3d doctor"

# A torch that does not fit its machine may crash at import; that is then one more finding.
_PROBE = (sys.executable, "-m", "megatron.fold3d.training.installation_facts")
_PROBE_S = 600.0
_NEEDED = ("torch", "megatron-core", "namespace")  # without these there is nothing to probe
_PLANS = "training"  # this finding stands for the planner alone, without torch and Megatron
_WIDTH = len("transformer-engine")
_SLOW_LINK = 4.0  # times as slow as the median link


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--json", action="store_true", help="the findings as one JSON object")
    parser.add_argument(
        "--write-cluster",
        type=Path,
        help="under torchrun: measure, and write a .toml file for --cluster",
    )


def run(args: Namespace) -> int:
    """Print the findings; returns the exit code."""
    file = args.write_cluster
    if file is not None:
        _check_cluster_file(file)
    speaks = os.environ.get("RANK", "0") == "0"
    tells = speaks and not args.json
    findings: list[Finding] = []

    def tell(more: Iterable[Finding]) -> None:
        for finding in more:
            findings.append(finding)
            if tells:
                write(f"{finding.verdict:<4}  {finding.what:<{_WIDTH}}  {finding.found}\n")
                if finding.fix and finding.verdict != "ok":
                    write(f"{'':<4}  {'':<{_WIDTH}}  -> {finding.fix}\n")

    tell(installation())
    links: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    plans_only = any(finding.what == _PLANS for finding in findings)
    if not (plans_only or any(f.verdict == "bad" and f.what in _NEEDED for f in findings)):
        if tells:
            complain("... imports torch and Megatron and applies the patches: some ten seconds")
        probed, links, machine = _probe(measures=file is not None)
        tell(probed)
    if file is not None and machine and speaks:
        file.write_text(cluster_toml(file.stem, machine, links), encoding="utf-8")
        tell([Finding("cluster", "ok", f"measured, and written to {file}")])
    bad = sum(finding.verdict == "bad" for finding in findings)
    if tells:
        ready = "ready to plan, simulate and search" if plans_only else "ready to train"
        write("\n".join([f"{bad} to fix" if bad else ready, *_link_lines(links)]) + "\n")
    elif speaks:
        found = [asdict(finding) for finding in findings]
        write(json.dumps({"ok": not bad, "findings": found, "links": links}) + "\n")
    return REJECTED if bad else OK


def _check_cluster_file(file: Path) -> None:
    """Refuse a file that could not be written, or not be read as a cluster.

    Raises:
        ValueError: what was found, the rule, and the fix.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        raise ValueError(
            f"--write-cluster {file} on one rank: links between ranks are measured; start with "
            f"torchrun --nproc-per-node 8 --no-python fold3d doctor --write-cluster {file}"
        )
    if file.suffix != ".toml" or not file.absolute().parent.is_dir():
        raise ValueError(f"--write-cluster {file}: give a .toml file in a folder that exists")


def cluster_toml(name: str, machine: Mapping[str, Any], links: Sequence[Mapping[str, Any]]) -> str:
    """Return a cluster file: its fields are those of `Cluster`.

    Args:
        machine: what every rank has, and the ranks of a node.
        links: between ranks, measured one at a time.
    """
    per_node = machine["gpus_per_node"]
    inside, between = _usual(links, per_node, "bytes_per_s")
    inside_s, between_s = _usual(links, per_node, "latency_s")
    fastest = max(rate for *_, rate in machine["layers"])
    layers = [[*sizes, round(rate / fastest, 4)] for *sizes, rate in machine["layers"]]
    fields = {
        "num_nodes": machine["num_nodes"],
        "gpus_per_node": per_node,
        "gpu_flops_per_s": fastest,
        "compute_efficiency": 1.0,
        "layer_efficiencies": layers,
        "memory_bytes_per_s": machine["device_bytes_per_s"],
        "multiprocessors": machine["multiprocessors"],
        "gpu_memory_bytes": machine["memory_bytes"],
        "intra_bytes_per_s": inside or between,
        "nic_bytes_per_s": between or inside,
        "nic_efficiency": 1.0,
        "nic_latency_s": between_s or inside_s,
        "host_copy_bytes_per_s": machine["host_copy_bytes_per_s"] * per_node,
        "host_memory_bytes": machine["host_memory_bytes"],
    }
    notes = [
        "Measured by `fold3d doctor`; rates are achieved ones, so that efficiencies are 1.",
        "FLOP/s are those of the fastest layer; layer_efficiencies has the part of them that each",
        "layer achieves: micro-batch, sequence, hidden size, tp, part. Between nodes one pair of",
        "ranks sent at a time: raise nic_bytes_per_s where a node has several NICs.",
    ]
    if between is None:
        notes.append("There is one node: nic_bytes_per_s is the rate inside it.")
    if inside is None:
        notes.append("There is one rank per node: intra_bytes_per_s is the rate between nodes.")
    lines = [*(f"# {note}" for note in notes), f"name = {json.dumps(name)}"]
    return "\n".join([*lines, *(f"{field} = {value}" for field, value in fields.items()), ""])


def _usual(links: Sequence[Mapping[str, Any]], per_node: int, what: str) -> Sequence[float | None]:
    """Return the medians of the links inside nodes, and of those between them."""
    found: tuple[list[float], list[float]] = [], []
    for link in links:
        found[link["source"] // per_node != link["target"] // per_node].append(link[what])
    return [median(each) if each else None for each in found]


def _probe(*, measures: bool) -> tuple[list[Finding], list[dict[str, Any]], dict[str, Any]]:
    """Return what torch and Megatron tell, in a process of their own."""
    command = [*_PROBE, *(["measure"] if measures else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        found = f"no answer within {_PROBE_S:.0f} s"
        fix = "if this is one of several ranks, look whether all of them run and reach each other"
        return [Finding("torch", "bad", found, fix)], [], {}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        found = f"importing torch or Megatron ends with exit code {done.returncode}: {last}"
        return [Finding("torch", "bad", found, f"run: {' '.join(_PROBE)}")], [], {}
    report = json.loads(done.stdout.splitlines()[-1])
    keys = ("source", "target", "latency_s", "bytes_per_s")
    links = [dict(zip(keys, link, strict=True)) for link in report["links"]]
    return [Finding(**finding) for finding in report["findings"]], links, report["machine"]


def _link_lines(links: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not links:
        return
    usual = median_high(link["bytes_per_s"] for link in links)
    yield ""
    rows = [("link", "Gb/s", "latency", "")]
    for link in links:
        slow = "slow" if link["bytes_per_s"] * _SLOW_LINK < usual else ""
        rate, latency = f"{link['bytes_per_s'] * 8e-9:.2f}", f"{link['latency_s'] * 1e6:.0f} µs"
        rows.append((f"{link['source']:>2} -> {link['target']}", rate, latency, slow))
    yield from table(rows)
