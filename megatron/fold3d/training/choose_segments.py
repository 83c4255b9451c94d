"""``--segments auto``, on every rank: measure, choose on the first rank, and agree.

Megatron reads its flag for virtual stages before there is a process group, so the ranks agree
through torchrun's store. Measurements are kept for later runs of the same shape.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.fold3d.config.job_sizes import num_microbatches
from megatron.fold3d.config.layer_split import num_layers
from megatron.fold3d.predict.cost_model.hardware_profile import HardwareProfile
from megatron.fold3d.training.auto_segments import SegmentChoice, choose
from megatron.fold3d.training.layer_memory import room_for_layers
from megatron.fold3d.training.measure_worker import meeting_point
from megatron.fold3d.training.measurement_cache import MeasurementCache

PATIENCE_S = 600.0
_PLAIN = (str, int, float, bool)


def choose_segments(
    args: Namespace, argv: Sequence[str], defaults: Mapping[str, Any], *, may_be_uneven: bool
) -> tuple[list[str], str]:
    """Return the flags of the choice, the same on every rank, and on the first rank the reason.

    Args:
        args: Megatron's namespace, as parsed.
        argv: the flags it was parsed from; a script's own may be among them.
        defaults: values of flags that are not given, by their attributes' names.
        may_be_uneven: whether stages may get unequal numbers of layers.

    Raises:
        ValueError: torchrun did not start the run, or the model cannot be measured.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError(
            "--segments auto without torchrun: ranks agree on it in torchrun's store; "
            "start with torchrun, or give --segments N"
        )
    store = meeting_point("segments")
    if os.environ["RANK"] != "0":
        if store.get("measure") == b"1":
            measure(argv, defaults)
        return store.get("segments").decode().split(), ""
    kept = MeasurementCache(args)
    measured = kept.read()
    store.set("measure", str(int(measured is None)))
    source = f"measured earlier, in {kept.path}"
    if measured is None:
        measured, source = (
            HardwareProfile.from_json(measure(argv, defaults)),
            f"measured now, kept in {kept.path}",
        )
        kept.write(measured)
    room = room_for_layers(args) if may_be_uneven else None
    choice = choose(args, measured, num_microbatches(args), room)
    _write_costs(args, measured, choice, kept.path)
    store.set("segments", " ".join(choice.flags))
    return choice.flags, f"{choice}; {source}"


def measure(argv: Sequence[str], defaults: Mapping[str, Any]) -> str:
    """Run this rank's measuring process; returns, on the first rank, what it has measured.

    Args:
        argv: flags of Megatron and of ours; others are ignored.
        defaults: values of flags that are not given; only those that JSON can represent.

    Raises:
        ValueError: it failed.
    """
    reading, writing = os.pipe()  # closed, by whatever ends this process, it ends the other
    with TemporaryDirectory(prefix="fold3d-") as folder:
        found = Path(folder) / "measured.json"
        module = "megatron.fold3d.training.measure_worker"
        plain = {name: value for name, value in defaults.items() if isinstance(value, _PLAIN)}
        before = [sys.executable, "-m", module, str(found), json.dumps(plain)]
        command = [*before, *argv, "--segments", "1"]
        try:
            job = subprocess.run(
                command,
                stdin=reading,
                capture_output=True,
                text=True,
                timeout=PATIENCE_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(
                f"--segments auto: nothing is measured after {PATIENCE_S:.0f} s; give --segments N"
            ) from None
        finally:
            os.close(reading)
            os.close(writing)
        if job.returncode != 0:
            *_, last = job.stderr.strip().splitlines() or ["no message"]
            raise ValueError(f"--segments auto: this cannot be measured: {last}; give --segments N")
        return found.read_text(encoding="utf-8") if found.is_file() else ""


def _write_costs(
    args: Namespace, measured: HardwareProfile, choice: SegmentChoice, path: Path
) -> None:
    """Leave a file for ``fold3d simulate --costs``."""
    num_ranks: int = args.pipeline_model_parallel_size
    stages = num_ranks * choice.num_segments
    costs = measured.costs(choice.layers or (num_layers(args) / stages,) * stages)
    file = path.with_name(f"{path.stem}-costs-of-{choice.num_segments}-segments.json")
    file.write_text(costs.to_json(), encoding="utf-8")
