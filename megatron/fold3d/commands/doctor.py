"""``fold3d doctor``: is this installation ready to train, and what to fix."""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from megatron.fold3d.commands.console import OK, REJECTED, write
from megatron.fold3d.commands.installation import Finding, installation

DESCRIPTION = """\
Look at the installation: versions, GPUs, NCCL, the compiled extension, the
namespace package, and whether every patch applies. Started by torchrun it also
compares the ranks with each other and measures the links between them."""

EXAMPLES = """\
examples:
  fold3d doctor
  torchrun --nproc-per-node 8 --no-python fold3d doctor
  srun torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d \\
      --rdzv-endpoint $HEAD:29400 --no-python fold3d doctor

exit code: 0 ready, 1 something has to be fixed"""

# A torch that does not fit its machine may crash at import; that is then one more finding.
_PROBE = (sys.executable, "-m", "megatron.fold3d.training.installation_facts")
_PROBE_S = 600.0
_NEEDED = ("torch", "megatron-core", "namespace")  # without these there is nothing to probe
_SLOW_LINK = 4.0  # times as slow as the median link


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--json", action="store_true", help="the findings as one JSON object")


def run(args: Namespace) -> int:
    """Print the findings; returns the exit code."""
    findings = list(installation())
    links: list[dict[str, Any]] = []
    if not any(f.verdict == "bad" and f.what in _NEEDED for f in findings):
        probed, links = _probe()
        findings += probed
    bad = any(finding.verdict == "bad" for finding in findings)
    if os.environ.get("RANK", "0") == "0":
        if args.json:
            found = [asdict(finding) for finding in findings]
            write(json.dumps({"ok": not bad, "findings": found, "links": links}) + "\n")
        else:
            write("\n".join([*_lines(findings), *_link_lines(links)]) + "\n")
    return REJECTED if bad else OK


def _probe() -> tuple[list[Finding], list[dict[str, Any]]]:
    """Return what torch and Megatron tell, in a process of their own."""
    try:
        done = subprocess.run(_PROBE, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        found = f"no answer within {_PROBE_S:.0f} s"
        fix = "if this is one of several ranks, look whether all of them run and reach each other"
        return [Finding("torch", "bad", found, fix)], []
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        found = f"importing torch or Megatron ends with exit code {done.returncode}: {last}"
        return [Finding("torch", "bad", found, f"run: {' '.join(_PROBE)}")], []
    report = json.loads(done.stdout.splitlines()[-1])
    keys = ("source", "target", "latency_s", "bytes_per_s")
    links = [dict(zip(keys, link, strict=True)) for link in report["links"]]
    return [Finding(**finding) for finding in report["findings"]], links


def _lines(findings: Sequence[Finding]) -> Iterator[str]:
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        yield f"{finding.verdict:<4}  {finding.what:<{width}}  {finding.found}"
        if finding.fix and finding.verdict != "ok":
            yield f"{'':<4}  {'':<{width}}  -> {finding.fix}"
    bad = sum(finding.verdict == "bad" for finding in findings)
    yield f"{bad} to fix" if bad else "ready to train"


def _link_lines(links: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not links:
        return
    rates = sorted(link["bytes_per_s"] for link in links)
    usual = rates[len(rates) // 2]
    yield ""
    yield "link       Gb/s   latency"
    for link in links:
        slow = "  slow" if link["bytes_per_s"] * _SLOW_LINK < usual else ""
        yield (
            f"{link['source']:>2} -> {link['target']:<3}"
            f"{link['bytes_per_s'] * 8e-9:>7.2f}  {link['latency_s'] * 1e6:>5.0f} µs{slow}"
        )
