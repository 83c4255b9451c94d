"""Every schedule trains what stock Megatron trains, bit for bit: one table, one test.

The two runs of a row have the same model, data and model chunks; they differ in who decides the
order. All rows train four iterations, evaluate after the third and the last, and clip gradients.
Unless a row says otherwise its model has a layer for each stage, and four at least.
"""

import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.training import TINY, differences, marked, once, train, train_as_planned

pytestmark = pytest.mark.gloo

MODEL = f"{TINY} --lr 1e-2 --eval-iters 1 --eval-interval 3"
ITERATIONS = "--train-iters 4 --lr-decay-iters 10"
# Stock's interleaved schedule takes any number of micro-batches only as one group: breadth-first.
ONE_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage {m}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison.

    Attributes:
        name: what the row adds to the others.
        m: micro-batches per iteration.
        flags: of both runs.
        ours: how our run is scheduled.
        stock: how the reference differs from `flags`.
        plan: the plan file that `ours` names ``PLAN``, or the `fold3d` command that prints it.
        repeats: whether other rows show what it does; then `make stress` alone runs it.
    """

    name: str = ""
    pp: int = 2
    segments: int = 1
    m: int = 4
    tp: int = 1
    dp: int = 1
    cp: int = 1
    flags: str = ""
    ours: str = "--schedule aiao"
    stock: str = ""
    plan: str = ""
    repeats: bool = False

    def __str__(self) -> str:
        sizes = {"pp": self.pp, "segments": self.segments, "m": self.m}
        sizes |= {
            name: n for name, n in (("tp", self.tp), ("dp", self.dp), ("cp", self.cp)) if n > 1
        }
        texts = [self.ours.removeprefix("--schedule "), self.name]
        texts += [f"{name}={n}" for name, n in sizes.items()]
        return ", ".join(filter(None, texts))

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
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
DRAWN = f"{EXPERTS} --moe-input-jitter-eps 0.1 --moe-router-force-biased 0"
PAIRS = ":pairs=on"
# Micro-batches: 1, 3, 3, 5; thresholds count tokens.
RAMP_UP = "--step-batch-size-schedule '0:1 16:3 112:5' --train-samples 12 --lr-decay-samples 30"
RAMP_UP_BY_TWO = (  # 2, 4, 4, 6, 6; stock's evaluation is not to have fewer than ranks
    "--step-batch-size-schedule '0:2 32:4 112:6' --train-samples 22 --lr-decay-samples 40 "
    "--eval-global-batch-size 4"
)

# The first two steps overflow and are skipped.
FP16 = "--fp16 --initial-loss-scale 524288 --hysteresis 1 --no-check-for-nan-in-loss-and-grad"
PLACED = ":wgrad=gaps:ahead=auto"

ROWS = (
    # Every schedule, against one run of stock for each layout.
    Row(segments=2),
    Row(segments=2, ours="--schedule interleaved"),
    Row(segments=2, ours="--schedule breadth-first"),
    Row(
        name="written by hand",
        segments=2,
        ours="--schedule plan=PLAN",
        plan="0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3\n"
        "1F0 1F1 1F2 1F3 3F0 3F1 3B0 3B1 3F2 1B0 1B1 3B2 3F3 3B3 1B2 1B3",
    ),
    Row(pp=4, m=6, ours="--schedule afab"),
    Row(pp=4, m=6, ours="--schedule shifted-critical-path"),
    Row(pp=4, m=6, ours="--schedule zb-h1"),
    Row(segments=2, ours="--schedule aiao:ahead=3", repeats=True),
    # Weight gradients apart from their backwards.
    Row(
        name="recomputed and overlapped",
        dp=2,
        m=3,
        flags=f"{OVERLAP} --bf16 --add-qkv-bias {FULL} uniform",
        ours="--schedule zb-h1",
    ),
    Row(
        name="fewer micro-batches than held, untied",
        repeats=True,
        dp=2,
        m=2,
        flags=f"--overlap-grad-reduce {BUCKETS} {UNTIED}",
        ours="--schedule zb-h2",
    ),
    # Orders that measured times choose: one until the third iteration, another from the fourth on.
    Row(
        name="recomputed and overlapped",
        segments=2,
        dp=2,
        flags=f"{OVERLAP} {FULL} uniform",
        ours="--schedule aiao:wgrad=gaps:ahead=auto",
        repeats=True,
    ),
    Row(
        name="sequence parallel",
        tp=2,
        segments=2,
        flags=f"--sequence-parallel {BUCKETS}",
        ours="--schedule interleaved:wgrad=gaps:held=8",
        repeats=True,
    ),
    *(
        Row(
            name="sequence parallel, recomputed, fp16, ramp-up",
            tp=2,
            flags=f"--sequence-parallel {FULL} uniform {FP16} {RAMP_UP}",
            ours=f"--schedule {ours}",
            repeats=True,
        )
        for ours in ("zb-h1", "zb-h2", f"1f1b{PLACED}")
    ),
    Row(
        name="all overlapped, fp16, some iterations skipped",
        segments=2,
        dp=2,
        flags=f"{OVERLAP} {FP16}",
        ours=f"--schedule interleaved{PLACED}",
    ),
    Row(
        name="sequence parallel, bf16, ramp-up",
        segments=2,
        tp=2,
        flags=f"--sequence-parallel --bf16 {RAMP_UP_BY_TWO}",
        ours=f"--schedule aiao:held=20{PLACED}",
        repeats=True,
    ),
    Row(
        name="of fold3d plan, recomputed, in buckets, untied",
        repeats=True,
        dp=2,
        flags=f"--overlap-grad-reduce {BUCKETS} {UNTIED} {FULL} uniform",
        ours="--schedule plan=PLAN",
        plan="fold3d plan --schedule 1f1b:wgrad=gaps:ahead=auto --pp 2 --microbatches 4 "
        "--compute-only --seconds p2p=1.5",
    ),
    # DP.sync between weight gradients, which are computed parameter by parameter.
    Row(
        name="reduced between weight gradients, fp16, in buckets, loss per token",
        segments=2,
        dp=2,
        flags=f"--overlap-grad-reduce {FP16} {BUCKETS} --calculate-per-token-loss",
        ours="--schedule aiao:wgrad=behind",
        repeats=True,
    ),
    # Autograd adds up the gradients of a layer's three uses; recomputed, each has its own backward.
    Row(
        name="a layer that is used three times",
        segments=2,
        m=3,
        flags=REPEATED,
        stock=ONE_GROUP,
        ours="--schedule aiao:wgrad=behind@1",
    ),
    Row(
        name="a layer that is used three times, recomputed",
        m=3,
        flags=f"{REPEATED} {FULL} uniform",
        ours="--schedule zb-h1",
    ),
    Row(  # what RMSNorm returns has strides with which not every matmul is folded
        name="RMSNorm, swiglu, rope",
        tp=2,
        segments=2,
        m=2,
        flags="--normalization RMSNorm --swiglu --disable-bias-linear "
        f"--position-embedding-type rope {UNTIED}",
        ours="--schedule aiao:wgrad=last@0",
        repeats=True,
    ),
    Row(
        name="no bias, selectively recomputed",
        tp=2,
        segments=2,
        flags=f"--sequence-parallel --disable-bias-linear --swiglu {SELECTIVE} {DROPOUT}",
        ours="--schedule interleaved:wgrad=last@1",
        repeats=True,
    ),
    # Recomputation ahead of the gradient.
    Row(
        pp=4,
        m=6,
        flags=f"{DROPOUT} {FULL} uniform",
        ours="--schedule shifted-critical-path:recompute=early",
        repeats=True,
    ),
    Row(
        segments=2,
        dp=2,
        flags=f"{OVERLAP} --bf16 {FULL} block {TWO_LAYERS}",
        ours="--schedule aiao:wgrad=last@1:recompute=early",
    ),
    Row(
        name="sequence parallel, by a plan file",
        tp=2,
        m=2,
        flags=f"--sequence-parallel {DROPOUT} {FULL} uniform --recompute-num-layers 2",
        ours="--schedule plan=PLAN",
        plan="0F0 0F1 0R1 0R0 0B0 0B1\n1F0 1R0 1B0 1F1 1B1",
        repeats=True,
    ),
    # A number of recomputed layers for each stage.
    Row(
        segments=2,
        flags=f"{DROPOUT} {TWO_LAYERS}",
        ours="--schedule aiao:recompute=early --recompute-layers 2,0,1,0",
        stock=ONE_GROUP,
    ),
    # Pairs of micro-batches, each computed during the other's tensor-parallel collectives.
    Row(
        name="an odd number, sequence parallel, recomputed",
        pp=1,
        tp=2,
        m=3,
        flags=f"--sequence-parallel --bf16 {FULL} uniform",
        ours=f"--schedule afab{PAIRS}",
        repeats=True,
    ),
    Row(
        name="gradients in buckets",
        pp=1,
        tp=2,
        dp=2,
        flags=f"--overlap-grad-reduce {BUCKETS} {SELECTIVE} {UNTIED}",
        ours=f"--schedule 1f1b{PAIRS}",
    ),
    # Reductions to shards that start between weight gradients.
    Row(
        name="one segment, whose gathers stock leaves to hooks",
        dp=2,
        m=3,
        flags=f"{OVERLAP} --bf16 --add-qkv-bias",
        ours="--schedule 1f1b:wgrad=behind",
    ),
    Row(
        name="bf16, tied",
        segments=4,
        dp=2,
        m=3,
        flags=f"{OVERLAP} --bf16",
        ours="--schedule aiao:wgrad=behind@0-3",
        stock=ONE_GROUP,
    ),
    Row(
        name="fp16, in buckets, loss per token, one of two",
        segments=2,
        dp=2,
        flags=f"{OVERLAP} --fp16 --initial-loss-scale 64 {UNTIED} {BUCKETS} "
        "--calculate-per-token-loss",
        ours="--schedule aiao:wgrad=behind@0:wgrad=last@1",
    ),
    Row(
        name="sequence parallel, some replicated",
        segments=2,
        dp=2,
        tp=2,
        flags=f"{OVERLAP} {UNTIED} --sequence-parallel",
        ours="--schedule interleaved:optimizer=replicated@1:wgrad=behind",
        repeats=True,
    ),
    # Recomputation early, by numbers, and in pairs.
    Row(
        name="all of Merak, overlapped",
        tp=2,
        segments=4,
        flags=f"--sequence-parallel --bf16 {OVERLAP}",
        ours=f"--schedule aiao:recompute=early{PAIRS} --recompute-layers 1,0,1,0,1,1,0,1",
        stock=ONE_GROUP,
    ),
    Row(
        name="and what is delayed",
        tp=2,
        segments=2,
        m=5,
        flags=f"--sequence-parallel {OVERLAP}",
        ours=f"--schedule aiao{PAIRS}:wgrad=last@0",
        stock=ONE_GROUP,
        repeats=True,
    ),
    Row(
        name="in groups",
        tp=2,
        segments=2,
        m=8,
        flags=f"--sequence-parallel {OVERLAP}",
        ours=f"--schedule interleaved{PAIRS}:group=4:wgrad=last@1",
        repeats=True,
    ),
    Row(
        name="needed again before the other of its pair has ended",
        tp=2,
        m=3,
        ours=f"--schedule aiao{PAIRS} --offload-activations on",
    ),
    # Models: the presets' heads, few layers.
    Row(
        name="CPM",
        segments=2,
        flags="--model-preset cpm --hidden-size 128 --num-attention-heads 64",
        repeats=True,
    ),
    # Sizes.
    *(
        Row(
            name="segments said otherwise",
            segments=2,
            flags=TWO_LAYERS,
            ours=f"--schedule aiao {flag} 2",
            repeats="layers" in flag,
        )
        for flag in (
            "--num-virtual-stages-per-pipeline-rank",
            "--num-layers-per-virtual-pipeline-stage",
        )
    ),
    Row(name="no pipeline", pp=1, dp=2, m=3, flags=OVERLAP, ours="--schedule 1f1b", repeats=True),
    Row(
        name="uneven groups",
        pp=4,
        segments=2,
        m=6,
        ours="--schedule interleaved",
        stock=ONE_GROUP,
    ),
    Row(name="fewer micro-batches than ranks", repeats=True, pp=4, m=2),
    Row(
        name="evaluation with one micro-batch",
        repeats=True,
        m=3,
        flags="--eval-global-batch-size 1",
    ),
    Row(name="batch-size ramp-up", flags=RAMP_UP),
    Row(name="batch-size ramp-up by groups", segments=2, flags=RAMP_UP_BY_TWO, repeats=True),
    Row(
        name="a batch made smaller, evaluation with other micro-batches",
        flags="--micro-batch-size 2 --global-batch-size 9 --decrease-batch-size-if-needed "
        "--eval-micro-batch-size 1",
    ),
    # Data parallelism.
    Row(
        name="gradients in buckets, not aligned",
        repeats=True,
        segments=2,
        dp=2,
        flags=f"--overlap-grad-reduce --no-align-grad-reduce --clip-grad 0 {BUCKETS}",
    ),
    Row(
        name="gradients in three buckets",
        segments=2,
        dp=2,
        flags="--overlap-grad-reduce --ddp-num-buckets 3",
        repeats=True,
    ),
    Row(
        name="all overlapped, clipping off",
        repeats=True,
        segments=2,
        dp=2,
        flags=f"{OVERLAP} --clip-grad 0 {BUCKETS}",
        ours="--schedule afab",
    ),
    Row(
        name="all overlapped, by a plan file",
        segments=2,
        dp=2,
        m=2,
        flags=f"{OVERLAP} --bf16",
        ours="--schedule plan=PLAN",
        plan=GATHERED,
    ),
    Row(
        name="slices of DP.sync and late receives, by a plan file",
        segments=2,
        dp=2,
        m=2,
        flags="--overlap-grad-reduce --bf16",
        ours="--schedule plan=PLAN",
        plan=SLICED,
    ),
    Row(
        name="slices between weight gradients and others, by a plan file",
        repeats=True,
        dp=2,
        m=2,
        flags="--overlap-grad-reduce --bf16",
        ours="--schedule plan=PLAN",
        plan="0F0 0F1 0B0 0B1 0W:500 0ALL_REDUCE:500 0W:1000 0ALL_REDUCE 0STEP\n"
        "1F0 1B0 1F1 1B1 1ALL_REDUCE:400 1ALL_REDUCE 1STEP",
    ),
    Row(
        name="all overlapped, slices of reduce-scatters",
        segments=2,
        dp=2,
        m=2,
        flags=f"{OVERLAP} --bf16",
        ours="--schedule aiao:slices=on",
    ),
    Row(
        name="all overlapped, fp16, some iterations skipped",
        segments=2,
        dp=2,
        flags=f"{OVERLAP} {FP16}",
    ),
    Row(
        name="all overlapped by hooks, bf16",
        repeats=True,
        segments=4,
        dp=2,
        m=3,
        flags=f"{OVERLAP} --no-align-grad-reduce --no-align-param-gather --bf16",
        stock=ONE_GROUP,
    ),
    Row(
        name="all overlapped, also by the optimizer's step",
        segments=2,
        dp=2,
        flags=f"{OVERLAP} --overlap-param-gather-with-optimizer-step --ckpt-format torch",
    ),
    # Reductions that DDP starts, ends or copies in ways of their own.
    Row(
        # Aligned, stock reduces its first batch twice.
        name="two instances of the distributed optimizer",
        segments=2,
        m=2,
        dp=4,
        flags=f"{ZERO} --overlap-grad-reduce --num-distributed-optimizer-instances 2",
        ours="--schedule interleaved",
        stock="--no-align-grad-reduce",
    ),
    Row(
        name="reduce-scatter that adds up in fp32",
        pp=1,
        m=2,
        dp=2,
        flags=f"{IN_BF16} {ZERO} --ddp-reduce-scatter-with-fp32-accumulation",
    ),
    Row(
        name="gradients of their own in fp32",
        repeats=True,
        pp=1,
        m=2,
        dp=2,
        flags=f"{IN_BF16} --ddp-param-name-patterns-for-fp32-local-accumulation all",
    ),
    Row(
        name="shards of gradients of their own in fp32",
        segments=2,
        m=2,
        dp=2,
        flags=f"{OVERLAP} --bf16 --grad-reduce-in-bf16 "
        "--ddp-param-name-patterns-for-fp32-local-accumulation all",
    ),
    # Tensor parallelism.
    Row(
        name="sequence parallel, bf16, recompute, untied",
        segments=2,
        tp=2,
        flags=f"--sequence-parallel --bf16 {SELECTIVE} {UNTIED}",
        ours="--schedule breadth-first",
        repeats=True,
    ),
    Row(
        name="full recompute of shared activations",
        repeats=True,
        segments=2,
        tp=2,
        flags=f"{FULL} uniform --distribute-saved-activations",
    ),
    # Context parallelism; its ranks share the reductions of gradients.
    Row(
        name="grouped queries, gradients in buckets",
        repeats=True,
        segments=2,
        cp=2,
        flags="--group-query-attention --num-query-groups 2 --position-embedding-type rope "
        f"--overlap-grad-reduce {BUCKETS}",
    ),
    Row(
        name="experts of two context-parallel ranks",
        segments=2,
        cp=2,
        m=2,
        flags=f"{EXPERTS} --moe-token-dispatcher-type alltoall {EP} --calculate-per-token-loss "
        f"--bf16 {SELECTIVE}",
    ),
    # Memory and precision.
    Row(  # with biases stock's recomputation of an MLP recurses without end
        name="selective recompute of MLPs",
        segments=2,
        flags=f"{SELECTIVE} --recompute-modules core_attn mlp --disable-bias-linear",
    ),
    Row(
        name="fp16 with one loss scale, gradients in fp32",
        segments=2,
        flags="--fp16 --loss-scale 4096 --accumulate-allreduce-grads-in-fp32",
    ),
    # Models.
    Row(name="an output layer that multi-token prediction leaves unused", m=2, flags=MTP),
    Row(
        name="multi-token prediction", repeats=True, segments=2, m=2, dp=2, flags=f"{MTP} {BUCKETS}"
    ),
    Row(
        name="uneven layers",
        repeats=True,
        segments=2,
        flags=f"{TWO_LAYERS} --decoder-first-pipeline-num-layers 2",
    ),
    Row(
        name="uneven layers at the end",
        segments=2,
        flags=f"{TWO_LAYERS} --decoder-last-pipeline-num-layers 2",
        repeats=True,
    ),
    Row(
        name="layout",
        segments=2,
        flags=f"{TWO_LAYERS} --pipeline-model-parallel-layout Et|ttt|tt|ttL",
    ),
    Row(
        name="embedding and loss count as layers",
        repeats=True,
        segments=2,
        flags="--num-layers 6 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
    ),
    Row(
        name="llama",
        segments=2,
        m=2,
        flags="--swiglu --normalization RMSNorm --position-embedding-type rope "
        f"--group-query-attention --num-query-groups 2 --disable-bias-linear {UNTIED}",
    ),
    Row(
        name="experts of two ranks, all overlapped",
        segments=2,
        dp=2,
        m=2,
        flags=f"{EXPERTS} --moe-token-dispatcher-type alltoall {EP} {OVERLAP}",
    ),
    Row(
        name="whole experts, recomputed, on tensor-parallel ranks",
        segments=2,
        tp=2,
        m=2,
        flags=f"{EXPERTS} --sequence-parallel --expert-tensor-parallel-size 1 "
        "--moe-router-load-balancing-type global_aux_loss --moe-layer-recompute --num-layers 4",
        repeats=True,
    ),
    # What should change nothing, or is told of a result.
    Row(
        name="timers with barriers, transfers overlapped everywhere, results not validated",
        segments=2,
        flags="--timing-log-level 2 --overlap-p2p-communication-warmup-flush --rerun-mode disabled",
        ours="--schedule interleaved",
    ),
    Row(
        name="multi-latent attention",
        segments=2,
        m=2,
        flags="--multi-latent-attention --qk-layernorm --q-lora-rank 8 "
        "--kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6",
    ),
    # Dropout: masks are drawn in the order of a rank's forwards.
    Row(name="dropout", segments=2, flags=DROPOUT, stock=ONE_GROUP),
    Row(  # in evaluation, too
        name="jitter and forced routing",
        segments=2,
        flags=f"{DRAWN} --microbatch-group-size-per-virtual-pipeline-stage 4",
        ours="--schedule interleaved",
    ),
    Row(
        name="dropout and full recompute",
        segments=2,
        flags=f"{DROPOUT} {FULL} uniform",
        ours="--schedule afab",
        stock=ONE_GROUP,
        repeats=True,
    ),
)


@pytest.mark.parametrize("row", marked(ROWS), ids=str)
def test_losses_norms_and_parameters_are_those_of_stock(row: Row, tmp_path: Path) -> None:
    plan_file = tmp_path / "plan"
    plan_file.write_text(_plan(row.plan))
    ours = row.command(row.ours.replace("PLAN", str(plan_file)))
    stock = row.command(f"--schedule stock {row.stock}")

    record = run_distributed(train_as_planned, row.num_ranks, ours, tmp_path)

    assert differences(record, once(train, row.num_ranks, stock)) == []


def test_another_order_of_backwards_would_be_seen(tmp_path: Path) -> None:
    # Last in, first out, as torch's ScheduleLoopedBFS: the same sums in another order.
    plan_file = tmp_path / "plan"
    plan_file.write_text("0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0\n1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0")
    row = Row()
    ours = run_distributed(train, 2, row.command(f"--schedule plan={plan_file}"))
    stock = once(train, 2, row.command("--schedule stock"))

    assert ours[1].iterations[0]["lm loss"] == stock[1].iterations[0]["lm loss"]
    assert differences(ours, stock) != []


def _plan(written: str) -> str:
    if not written.startswith("fold3d "):
        return written
    command = [str(Path(sys.executable).with_name("fold3d")), *written.split()[1:]]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout
