"""Every schedule trains what stock Megatron trains, bit for bit: one table, one test.

The two runs of a row have the same model, data and model chunks; they differ in who decides the
order. All rows train four iterations, evaluate after the third and the last, and clip gradients.
Unless a row says otherwise its model has a layer for each stage, and four at least.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.fold3d.runtime.preemption.communicator import extension
from tests.distributed import run_distributed
from tests.end_to_end.training import (
    TINY,
    Record,
    as_known,
    differences,
    marked,
    once,
    train,
    train_as_planned,
    train_with_engine,
)

pytestmark = pytest.mark.gloo

MODEL = f"{TINY} --lr 1e-2 --eval-iters 1 --eval-interval 3"
ITERATIONS = "--train-iters 4 --lr-decay-iters 10"
# Stock's interleaved schedule takes any number of micro-batches only as one group: breadth-first.
ONE_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage {m}"


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        word: how our run is scheduled, and what else it has.
        flags: of both runs.
        m: micro-batches per iteration.
        stock: how the reference differs from `flags`.
        plan: the plan file that `word` names ``PLAN``.
        repeats: whether other rows show what it does; then `make stress` alone runs it.
        trains: what a rank of ours runs, with its command line and a folder.
        reference: what a rank of stock runs, with its command line.
    """

    word: str = "aiao"
    flags: str = ""
    _: KW_ONLY
    pp: int = 2
    segments: int = 2
    m: int = 4
    tp: int = 1
    dp: int = 1
    cp: int = 1
    stock: str = ""
    plan: str = ""
    repeats: bool = False
    trains: Callable[..., Any] = train_as_planned
    reference: Callable[..., Any] = train

    def __str__(self) -> str:
        sizes = {"pp": self.pp, "segments": self.segments, "m": self.m}
        others = {"tp": self.tp, "dp": self.dp, "cp": self.cp}
        sizes |= {name: size for name, size in others.items() if size > 1}
        texts = [self.word, self.flags, *(f"{name}={size}" for name, size in sizes.items())]
        return ", ".join(filter(None, texts))

    @property
    def ours(self) -> str:
        return f"--schedule {self.word}"

    @property
    def is_late(self) -> bool:
        """Whether a step may wait for the next iteration, which then knows its norm."""
        return "step=next" in self.word or self.word == "auto"

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.dp * self.cp

    def command(self, scheduled: str) -> tuple[str, ...]:
        parallel = {"pipeline": self.pp, "tensor": self.tp}
        flags = [f"--{kind}-model-parallel-size {size}" for kind, size in parallel.items()]
        flags.append(f"--num-layers {max(4, self.pp * self.segments)}")
        if self.cp > 1:
            flags.append(f"--context-parallel-size {self.cp}")
        if "--pipeline-model-parallel-layout" not in self.flags:
            flags.append(f"--segments {self.segments}")
        if "--step-batch-size-schedule" not in self.flags:
            flags.append(f"{ITERATIONS} --global-batch-size {self.m * self.dp}")
        flags += [self.flags, scheduled.format(m=self.m)]
        return tuple(shlex.split(" ".join([MODEL, *flags])))


ZERO = "--use-distributed-optimizer"
OVERLAP = f"{ZERO} --overlap-grad-reduce --overlap-param-gather"
BUCKETS = "--ddp-bucket-size 2000"  # a layer has 12 thousand parameters
IN_BF16 = f"--overlap-grad-reduce --bf16 --grad-reduce-in-bf16 {BUCKETS}"
MTP = "--mtp-num-layers 1 --position-embedding-type rope --overlap-grad-reduce"
REPEATED = f"{MTP} --mtp-num-layers 3 --mtp-use-repeated-layer"
BY_HAND = """\
0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3
1F0 1F1 1F2 1F3 3F0 3F1 3B0 3B1 3F2 1B0 1B1 3B2 3F3 3B3 1B2 1B3
"""
# All gathers at the start, the second segment's first.
GATHERED = """\
2ALL_GATHER 0ALL_GATHER 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
3ALL_GATHER 1ALL_GATHER 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
"""
# DP.sync in slices, and receives as they are posted where one hardware queue holds all streams.
SLICED = """\
0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2RECV_F1 2F0 2SEND_F0 2F1 2SEND_F1 2RECV_B0 2B0 2RECV_B1 \
2SEND_B0 2B1 0RECV_B0 2SEND_B1 2ALL_REDUCE:300 0B0 0RECV_B1 2ALL_REDUCE 0B1 0ALL_REDUCE:1 \
0ALL_REDUCE 2STEP 0STEP
1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1 3RECV_F0 3RECV_F1 3F0 3B0 3SEND_B0 3F1 3B1 1RECV_B0 \
3SEND_B1 3ALL_REDUCE:500 1B0 1RECV_B1 1SEND_B0 3ALL_REDUCE 1B1 1SEND_B1 1ALL_REDUCE 3STEP \
1STEP
"""
SELECTIVE = "--recompute-granularity selective"
TWO_LAYERS = "--num-layers 8"  # in each of four stages
FULL = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"
UNTIED = "--untie-embeddings-and-output-weights"
EXPERTS = (
    "--num-experts 2 --moe-aux-loss-coeff 0.01 --moe-router-topk 1 --moe-router-pre-softmax "
    "--disable-bias-linear"
)
EP = "--expert-model-parallel-size 2"
ALLTOALL = f"{EXPERTS} --moe-token-dispatcher-type alltoall {EP}"
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
DRAWN = f"{EXPERTS} --moe-input-jitter-eps 0.1 --moe-router-force-biased 0"
PAIRS = ":pairs=on"
# Micro-batches: 1, 3, 3, 5; thresholds count tokens.
RAMP_UP = "--step-batch-size-schedule '0:1 16:3 112:5' --train-samples 12 --lr-decay-samples 30"

# The first two steps overflow and are skipped.
FP16 = "--fp16 --initial-loss-scale 524288 --hysteresis 1 --no-check-for-nan-in-loss-and-grad"
PLACED = ":wgrad=gaps:ahead=auto"
ENGINE = "--transformer-impl transformer_engine"
# Their matmuls add to ``main_grad`` themselves.
FUSED: dict[str, Any] = dict.fromkeys(
    ("trains", "reference"), partial(train_with_engine, fuses=True)
)
SLICES = "aiao:slice-bytes=4096"

ROWS = (
    # Every schedule, against one run of stock for each layout.
    Row(),
    Row("interleaved"),
    Row("breadth-first"),
    Row("plan=PLAN", plan=BY_HAND),
    Row("afab", pp=4, m=6, segments=1),
    # Weight gradients apart from their backwards.
    Row("zb-h1", f"{OVERLAP} --bf16 --add-qkv-bias {FULL} uniform", dp=2, m=3, segments=1),
    # Orders that measured times choose: one until the third iteration, another from the fourth on.
    Row(f"interleaved{PLACED}", f"{OVERLAP} {FP16}", dp=2),
    # What the fuzzer does not draw.
    Row("interleaved:wgrad=gaps:held=8", "--sequence-parallel", tp=2, repeats=True),
    Row(f"interleaved{PAIRS}:group=4", "--sequence-parallel", tp=2, m=8, repeats=True),
    # Autograd adds up the gradients of a layer's three uses; recomputed, each has its own backward.
    Row("aiao:wgrad=behind@1", REPEATED, m=3, stock=ONE_GROUP),
    Row("zb-h1", f"{REPEATED} {FULL} uniform", m=3, segments=1),
    # What RMSNorm returns has strides with which not every matmul is folded.
    Row(
        "aiao:wgrad=last@0",
        "--normalization RMSNorm --swiglu --disable-bias-linear "
        f"--position-embedding-type rope {UNTIED}",
        tp=2,
        m=2,
        repeats=True,
    ),
    # Recomputation ahead of the gradient.
    Row(
        "shifted-critical-path:recompute=early", f"{DROPOUT} {FULL} uniform", pp=4, m=6, segments=1
    ),
    Row("aiao:wgrad=last@1:recompute=early", f"{OVERLAP} --bf16 {FULL} block {TWO_LAYERS}", dp=2),
    # Pairs of micro-batches, each computed during the other's tensor-parallel collectives.
    Row(
        f"1f1b{PAIRS}",
        f"--overlap-grad-reduce {BUCKETS} {SELECTIVE} {UNTIED}",
        pp=1,
        tp=2,
        dp=2,
        segments=1,
    ),
    # Reductions to shards that start between weight gradients.
    Row("1f1b:wgrad=behind", f"{OVERLAP} --bf16 --add-qkv-bias", dp=2, m=3, segments=1),
    Row(
        "aiao:wgrad=behind@0:wgrad=last@1",
        f"{OVERLAP} --fp16 --initial-loss-scale 64 {UNTIED} {BUCKETS} --calculate-per-token-loss",
        dp=2,
    ),
    # Recomputation early, by numbers, and in pairs.
    Row(
        f"aiao:recompute=early{PAIRS} --recompute-layers 1,0,1,0,1,1,0,1",
        f"--sequence-parallel --bf16 {OVERLAP}",
        tp=2,
        segments=4,
        stock=ONE_GROUP,
    ),
    Row(f"aiao{PAIRS} --offload-activations on", tp=2, m=3, segments=1),
    # Sizes.
    Row("aiao --num-virtual-stages-per-pipeline-rank 2", TWO_LAYERS),
    Row("aiao --num-layers-per-virtual-pipeline-stage 2", TWO_LAYERS, repeats=True),
    Row("interleaved", pp=4, m=6, stock=ONE_GROUP),
    Row(
        "aiao",
        "--micro-batch-size 2 --global-batch-size 9 --decrease-batch-size-if-needed "
        "--eval-micro-batch-size 1",
        segments=1,
    ),
    # Data parallelism.
    Row("aiao", "--overlap-grad-reduce --ddp-num-buckets 3", dp=2, repeats=True),
    Row("plan=PLAN", f"{OVERLAP} --bf16", dp=2, m=2, plan=GATHERED),
    Row("plan=PLAN", "--overlap-grad-reduce --bf16", dp=2, m=2, plan=SLICED),
    Row("aiao", f"{OVERLAP} --overlap-param-gather-with-optimizer-step --ckpt-format torch", dp=2),
    # Reductions that DDP starts, ends or copies in ways of their own.
    # Aligned, stock reduces its first batch twice.
    Row(
        "interleaved",
        f"{ZERO} --overlap-grad-reduce --num-distributed-optimizer-instances 2",
        m=2,
        dp=4,
        stock="--no-align-grad-reduce",
    ),
    Row(
        "aiao",
        f"{IN_BF16} {ZERO} --ddp-reduce-scatter-with-fp32-accumulation",
        pp=1,
        m=2,
        dp=2,
        segments=1,
    ),
    Row(
        "aiao",
        f"{OVERLAP} --bf16 --grad-reduce-in-bf16 "
        "--ddp-param-name-patterns-for-fp32-local-accumulation all",
        m=2,
        dp=2,
    ),
    # PP.sync before DP.sync: when something is sent changes, not what.
    Row(f"{SLICES} --preemptive-comm", f"{OVERLAP} --bf16 {TWO_LAYERS}", dp=2),
    Row(
        f"{SLICES}:step=next:share=0.5 --preemptive-comm",
        f"--overlap-grad-reduce --clip-grad 0 {TWO_LAYERS}",
        dp=2,
    ),
    Row(
        f"{SLICES} --preemptive-comm --offload-activations on --lazy-inter-segment",
        f"{ZERO} --overlap-grad-reduce {SELECTIVE} {TWO_LAYERS}",
        dp=2,
    ),
    # Tensor parallelism.
    Row("aiao", f"{FULL} uniform --distribute-saved-activations", repeats=True, tp=2),
    # Context parallelism; its ranks share the reductions of gradients.
    Row(
        "aiao",
        f"{ALLTOALL} --calculate-per-token-loss --bf16 {SELECTIVE}",
        cp=2,
        m=2,
    ),
    # Memory and precision.
    # With biases stock's recomputation of an MLP recurses without end
    Row("aiao", f"{SELECTIVE} --recompute-modules core_attn mlp --disable-bias-linear"),
    Row("aiao", "--fp16 --loss-scale 4096 --accumulate-allreduce-grads-in-fp32"),
    # Models.
    Row("aiao", MTP, m=2, segments=1),
    Row("aiao", f"{TWO_LAYERS} --decoder-first-pipeline-num-layers 2", repeats=True),
    Row("aiao", f"{TWO_LAYERS} --decoder-last-pipeline-num-layers 2", repeats=True),
    Row("aiao", f"{TWO_LAYERS} --pipeline-model-parallel-layout Et|ttt|tt|ttL"),
    Row(
        "aiao",
        "--num-layers 6 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
        repeats=True,
    ),
    Row(
        "aiao",
        "--swiglu --normalization RMSNorm --position-embedding-type rope "
        f"--group-query-attention --num-query-groups 2 --disable-bias-linear {UNTIED}",
        m=2,
    ),
    Row(
        "aiao",
        f"{EXPERTS} --sequence-parallel --expert-tensor-parallel-size 1 "
        "--moe-router-load-balancing-type global_aux_loss --moe-layer-recompute --num-layers 4",
        tp=2,
        m=2,
        repeats=True,
    ),
    # Delayed weight gradients of modules that stand in for Transformer Engine's.
    Row("aiao:wgrad=behind", f"{ENGINE} --overlap-grad-reduce", dp=2, **FUSED),
    Row("aiao:wgrad=last", f"{ENGINE} --sequence-parallel {FULL} uniform", tp=2, **FUSED),
    Row(
        "zb-h1",
        f"{ENGINE} {OVERLAP} --bf16",
        dp=2,
        trains=train_with_engine,
        reference=train_with_engine,
        segments=1,
    ),
    # What should change nothing, or is told of a result.
    Row(
        "interleaved",
        "--timing-log-level 2 --overlap-p2p-communication-warmup-flush --rerun-mode disabled",
    ),
    Row(
        "aiao",
        "--multi-latent-attention --qk-layernorm --q-lora-rank 8 "
        "--kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6",
        m=2,
    ),
    # Dropout: masks are drawn in the order of a rank's forwards.
    Row("aiao", DROPOUT, stock=ONE_GROUP),
    # In evaluation, too.
    Row("interleaved", f"{DRAWN} --microbatch-group-size-per-virtual-pipeline-stage 4"),
)


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_losses_norms_and_parameters_are_those_of_stock(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


def check(row: Row, folder: Path) -> None:
    """Train a row and its reference, and compare all that ours knows when an iteration ends."""
    if "--preemptive-comm" in row.word and extension() is None:
        pytest.skip("needs the extension: make extension")
    plan_file = folder / "plan"
    plan_file.write_text(row.plan)
    ours = row.command(row.ours.replace("PLAN", str(plan_file)))
    check_records(row, run_distributed(row.trains, row.num_ranks, ours, folder))
    assert len(stock_of(row)[0].iterations) >= 3


def compared(row: Row, train: Callable[..., tuple[Record, Any]], *args: Any) -> tuple[Any, ...]:
    """Train and compare as `check`, without a plan; returns what ranks tell beside their record."""
    found = run_distributed(train, row.num_ranks, row.command(row.ours), *args)
    records, told = zip(*found, strict=True)
    check_records(row, records)
    return told


def check_records(row: Row, records: Sequence[Record]) -> None:
    """Compare what ranks have recorded with what the row's reference records."""
    stock = stock_of(row)
    assert differences(records, as_known(records, stock) if row.is_late else stock) == []


def stock_of(row: Row) -> list[Record]:
    """Return what the row's reference records."""
    return once(row.reference, row.num_ranks, row.command(f"--schedule stock {row.stock}"))


def test_another_order_of_backwards_would_be_seen(tmp_path: Path) -> None:
    # Last in, first out, as torch's ScheduleLoopedBFS: the same sums in another order.
    plan_file = tmp_path / "plan"
    plan_file.write_text("0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0\n1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0")
    row = Row(segments=1)
    ours = run_distributed(train, 2, row.command(f"--schedule plan={plan_file}"))
    stock = stock_of(row)
    assert ours[1].iterations[0]["lm loss"] == stock[1].iterations[0]["lm loss"]
    assert differences(ours, stock) != []
