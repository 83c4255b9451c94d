"""What flags mean: from a command line to fields of the configuration."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tests.config.conftest import Configure

OVERLAP = "--schedule aiao --overlap-grad-reduce"
ZERO = f"{OVERLAP} --use-distributed-optimizer"
GATHERS = f"{ZERO} --overlap-param-gather"
ON_CPU = f"{OVERLAP} --device cpu"
NEXT = "--schedule aiao:step=next:share=0.5 --overlap-grad-reduce"
LOCAL = "--transformer-impl local --no-gradient-accumulation-fusion"
PAIRED = (
    "--schedule aiao:pairs=on --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--tensor-model-parallel-size 2"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TWO = "--schedule aiao --segments 2"
FOUR = f"--schedule aiao --segments 4 {LOCAL}"
GROUPED = "--schedule interleaved --segments 2 --pipeline-model-parallel-size 4"

MEANS = (
    # The plan gathers parameters, whatever stock aligns.
    (GATHERS, "job.gathers_params", True),
    (f"{GATHERS} --no-align-param-gather", "job.gathers_params", True),
    (ZERO, "job.gathers_params", False),
    # DP.sync starts between weight gradients where it is an all-reduce of Megatron's groups.
    (ON_CPU, "job.reduces_early", True),
    ("--schedule aiao --device cpu", "job.reduces_early", False),
    (f"{GATHERS} --device cpu", "job.reduces_early", True),
    (f"{ZERO} --device cpu", "job.reduces_early", False),
    (f"{ON_CPU} --deterministic-mode", "job.reduces_early", False),
    (f"{ON_CPU} --preemptive-comm", "job.reduces_early", False),
    # Receives are further ahead only without a GPU.
    (ON_CPU, "job.receives_ahead", 3),
    (OVERLAP, "job.receives_ahead", 1),
    # Steps depend on gradients with clipping and with a loss scaler.
    (NEXT, "clips_or_scales", True),
    (f"{NEXT} --clip-grad 0", "clips_or_scales", False),
    (f"{NEXT} --clip-grad 0 --bf16", "clips_or_scales", False),
    (f"{NEXT} --clip-grad 0 --fp16", "clips_or_scales", True),
    (f"{NEXT} --clip-grad 0 --bf16 --loss-scale 2", "clips_or_scales", True),
    # Slices are small on CPUs unless told otherwise, and need no step=next with preemption.
    (NEXT, "slice_bytes", 8 << 20),
    (f"{NEXT} --device cpu", "slice_bytes", 1 << 19),
    (f"{NEXT} --device cpu --schedule aiao:step=next:slice-bytes=65536", "slice_bytes", 65536),
    ("--schedule aiao:slice-bytes=65536 --preemptive-comm", "slice_bytes", 65536),
    ("--schedule aiao:slice-bytes=65536 --preemptive-comm", "choice.slice_bytes", 65536),
    ("--schedule aiao --preemptive-comm", "preemptive_comm", True),
    ("--schedule aiao --traffic-class pp=184", "traffic_class", {"pp": 184}),
    # Weights are sharded, and gradients with them if asked for.
    (GATHERS, "job.shards", "off"),
    (f"{GATHERS} --segments 2 --shard-segments weights", "job.shards", "weights"),
    (f"{GATHERS} --segments 2 --shard-segments gradients", "job.shards", "gradients"),
    # Segments are named, in any order, or all.
    (FOUR, "apart", ()),
    (f"{FOUR} --schedule aiao:wgrad=last", "apart", (0, 1, 2, 3)),
    (f"{FOUR} --schedule aiao:wgrad=last@2,1", "apart", (1, 2)),
    (f"--schedule zb-h1 {LOCAL}", "apart", (0,)),
    (f"{TWO} {FULL}", "early_stages", ()),
    (f"{TWO} {FULL} --schedule aiao:recompute=early@1", "early_stages", (2, 3)),
    (f"{TWO} {FULL} --schedule aiao:recompute=early", "early_stages", (0, 1, 2, 3)),
    # Each stage has a number of recomputed layers; `auto` has a limit, or what the GPU has left.
    (TWO, "recompute_layers", None),
    (f"{TWO} --recompute-layers 2,0,1,0", "recompute_layers", (2, 0, 1, 0)),
    (f"{TWO} --recompute-layers auto", "recompute_layers", None),
    (f"{TWO} --recompute-layers auto", "auto_recompute_layers", True),
    (f"{TWO} --recompute-layers auto", "activation_memory_bytes", None),
    (
        f"{TWO} --recompute-layers auto --device cpu --activation-memory-bytes 9",
        "activation_memory_bytes",
        9,
    ),
    # Pairs are off unless asked for; experts are paired without tensor parallelism, too.
    (TWO, "choice.pairs", None),
    (PAIRED, "choice.pairs", True),
    (
        f"{PAIRED} {EXPERTS} --tensor-model-parallel-size 1 --transformer-impl transformer_engine",
        "choice.pairs",
        True,
    ),
    # Groups hold a micro-batch for each rank.
    (f"{GROUPED} --microbatch-group-size-per-virtual-pipeline-stage 4", "choice.group", 4),
    (f"{GROUPED} --schedule interleaved:group=5", "choice.group", 5),
    # Traced iterations are the first and the last one, or Megatron's.
    ("--trace new --trace-iterations 7-9", "trace_iterations", range(7, 10)),
    ("--trace new --trace-iterations 7", "trace_iterations", range(7, 8)),
    ("--trace new", "trace_iterations", None),
    ("--trace new", "trace", Path("new")),
)


@pytest.mark.parametrize(("flags", "field", "value"), MEANS)
def test_flags_say_a_field_of_the_configuration(
    config: Configure, flags: str, field: str, value: Any
) -> None:
    assert attrgetter(field)(config(flags)) == value
