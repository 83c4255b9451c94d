"""Draw runs that users may ask for: flags for stock Megatron, and some for schedules of ours.

What is legal is not written down here. A draw that the project's own checks refuse is thrown away,
so a rule that is missing there shows as a run that fails, and a rule that is too strict as flags
that are never drawn.
"""

import os
import random
import shlex
from argparse import ArgumentError, ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from graphlib import TopologicalSorter
from itertools import product
from tempfile import NamedTemporaryFile
from unittest.mock import patch

from megatron.training.arguments import add_megatron_arguments

from fold3d_patches.cpu import flags as cpu_flags
from megatron.fold3d.config.all_flags import add_arguments
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.config.run_flags import run_problems

MODEL = (
    "--device cpu --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --mock-data --tokenizer-type NullTokenizer --vocab-size 63 "
    "--make-vocab-size-divisible-by 8 --num-workers 0 --lr 1e-2 --attention-dropout 0 "
    "--hidden-dropout 0"
)
ZERO = "--use-distributed-optimizer"
OVERLAP = f"{ZERO} --overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method"
EXPERTS = (
    "--num-experts 6 --moe-aux-loss-coeff 0.01 --moe-router-topk 1 --moe-router-pre-softmax "
    "--disable-bias-linear"
)
ETP = "--expert-tensor-parallel-size 1"
OVERFLOWS = "--fp16 --initial-loss-scale 1073741824 --hysteresis 1 --loss-scale-window 2"
AUTO = "--schedule auto"
LONG = 9  # iterations, in which `auto` has tried two choices
ONE_GROUP = "--microbatch-group-size-per-virtual-pipeline-stage {m}"

# Of both runs. The first value of each is what a shrunk case has.
SHARED: Mapping[str, Sequence[str]] = {
    "sequences": ("--micro-batch-size 1", "--micro-batch-size 2"),
    "precision": (
        "",
        "--bf16",
        "--bf16 --grad-reduce-in-bf16",
        "--fp16 --initial-loss-scale 65536",
        "--fp16 --loss-scale 128 --accumulate-allreduce-grads-in-fp32",
        f"{OVERFLOWS} --no-check-for-nan-in-loss-and-grad",
    ),
    "clipping": ("", "--clip-grad 0", "--clip-grad 0.1", "--clip-grad 2", "--clip-grad 100"),
    "gradients": (
        "",
        "--overlap-grad-reduce",
        "--overlap-grad-reduce --ddp-bucket-size 500",
        "--overlap-grad-reduce --ddp-bucket-size 500 --no-align-grad-reduce",
        "--overlap-grad-reduce --ddp-num-buckets 3",
        ZERO,
        f"{ZERO} --overlap-grad-reduce --ddp-bucket-size 500",
        OVERLAP,
        f"{OVERLAP} --no-align-param-gather --ddp-bucket-size 500",
        f"{OVERLAP} --overlap-param-gather-with-optimizer-step --ckpt-format torch",
    ),
    "recomputation": (
        "",
        "--recompute-granularity selective",
        f"{FULL} uniform --recompute-num-layers 1",
        f"{FULL} block --recompute-num-layers 1",
        f"{FULL} uniform --recompute-num-layers 2",
        f"{FULL} uniform --recompute-num-layers 1 --distribute-saved-activations",
    ),
    "model": (
        "",
        "--untie-embeddings-and-output-weights",
        "--swiglu --ffn-hidden-size 32 --disable-bias-linear --normalization RMSNorm "
        "--position-embedding-type rope --untie-embeddings-and-output-weights",
        "--qk-layernorm --add-qkv-bias",
        "--apply-residual-connection-post-layernorm",
        f"{EXPERTS} --moe-token-dispatcher-type alltoall",
        f"{EXPERTS} --moe-token-dispatcher-type alltoall --expert-model-parallel-size {{dp}}",
        f"{EXPERTS} --moe-token-dispatcher-type alltoall --expert-model-parallel-size {{dp}} "
        "--moe-shared-expert-intermediate-size 16",
        "--group-query-attention --num-query-groups 2 --squared-relu",
    ),
    "untied": ("", "--untie-embeddings-and-output-weights"),
    "multi-token prediction": (
        "",
        "--mtp-num-layers 1 --position-embedding-type rope",
        "--mtp-num-layers 2 --position-embedding-type rope",
        "--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope",
    ),
    # Regular expressions for a chunk's number and a parameter's name; `fuzz` freezes what matches.
    "frozen": (
        "",
        *(f"--frozen '{name}'" for name in ("bias", "norm", "^0", "embed|output", "fc1.w", "s.0")),
    ),
    "tensor parallel": ("", "--sequence-parallel", f"--sequence-parallel {ETP}"),
    "loss": ("", "--calculate-per-token-loss"),
    "optimizer": (
        "",
        "--optimizer sgd",
        "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear",
        "--lr-warmup-iters 2 --lr-decay-style cosine --adam-beta2 0.9",
    ),
    "evaluation": (
        "--eval-iters 0 --eval-interval 100",
        "--eval-iters 1 --eval-interval 3",
        "--eval-iters 2 --eval-interval 1",
        "--eval-iters 1 --eval-interval 2 --eval-global-batch-size {few}",
    ),
    "draws": (
        "",
        "--attention-dropout 0.1 --hidden-dropout 0.1",
        f"{EXPERTS} --moe-router-force-load-balancing",
        f"{EXPERTS} --moe-router-force-biased 0.5 --moe-input-jitter-eps 0.1",
        f"{EXPERTS} --moe-router-force-biased=-1",
    ),
    "batches": ("", "ramp-up"),
    "layers": ("one", "two", "more first", "more last"),
    "checks": (
        "",
        "--rerun-mode disabled",
        "--no-check-for-nan-in-loss-and-grad",
        "--log-interval 1 --log-params-norm",
        "--log-interval 1 --log-num-zeros-in-grad",
        "--timing-log-level 2 --log-interval 1",
        "--check-weight-hash-across-dp-replicas-interval 1",
        "--manual-gc --manual-gc-interval 2",
        "--deterministic-mode",
    ),
    "seed": ("--seed 1234", "--seed 1", "--seed 2", "--seed 3"),
}
# Of a run of ours.
OURS: Mapping[str, Sequence[str]] = {
    "schedule": (
        "--schedule aiao",
        "--schedule aiao:ahead=1",
        "--schedule aiao:ahead=3",
        "--schedule afab",
        "--schedule 1f1b",
        "--schedule 1f1b:ahead=2",
        "--schedule interleaved",
        "--schedule breadth-first",
        "--schedule shifted-critical-path",
        "--schedule zb-h1",
        "--schedule zb-h2",
        "--schedule plan=PLAN",
        AUTO,
    ),
    "deferral": (
        "",
        ":step=next:share=0",
        ":step=next:share=0.4",
        ":step=next:share=1",
        ":step=next",
        ":step=next:share=0.4:slice-bytes=4096",
    ),
    "preemption": ("", "--preemptive-comm", ":slice-bytes=4096 --preemptive-comm"),
    "host memory": (
        "",
        "--offload-activations on",
        "--offload-activations auto",
        "--lazy-inter-segment",
        "--offload-activations on --lazy-inter-segment",
    ),
    "weight gradients": (
        "",
        ":wgrad=last@0",
        ":wgrad=last@{segments}",
        ":wgrad=behind@0",
        ":wgrad=behind@{segments}",
        ":wgrad=gaps:ahead=auto",
    ),
    "replicated": (
        "",
        ":optimizer=replicated@0",
        ":optimizer=replicated@{segments}",
        ":optimizer=replicated",
        ":optimizer=auto",
    ),
    "slices": ("", ":slices=on"),
    "shards": ("", "--shard-segments weights", "--shard-segments gradients"),
    "pairs": ("", ":pairs=on"),
    "coded gathers": ("", "--delta-param-gather on"),
    "coded sums": ("", "--coded-grad-reduce on"),
    "early recomputation": ("", ":recompute=early", ":recompute=early@0"),
    "trace": ("", "--trace FOLDER/trace --trace-iterations 1-2"),
    # Who saves after the second iteration, and who goes on from there; "aiao" has no other part.
    "checkpoint": ("", "ours, ours", "ours, stock", "stock, ours", "ours, aiao", "aiao, ours"),
    "checkpoint format": ("", "--ckpt-format torch", "--ckpt-fully-parallel-load"),
}
# How often a draw leaves the first value; what others depend on, more often.
CHANCE = 0.25
CHANCES = {
    "model": 0.5,
    "replicated": 0.4,
    "gradients": 0.75,
    "recomputation": 0.5,
    "draws": 0.25,
    "frozen": 0.12,
    "slices": 0.1,
    "shards": 0.1,
    "deferral": 0.4,
    "pairs": 0.4,
    "coded gathers": 0.6,
    "early recomputation": 0.4,
    "weight gradients": 0.35,
    "host memory": 0.35,
    "preemption": 0.35,
    "trace": 0.15,
    "checkpoint": 0.3,  # two runs more
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSet:
    """One comparison; `SHARED` and `OURS` say which settings there are.

    Attributes:
        m: micro-batches per iteration.
        iterations: of training.
        one_group: whether stock's interleaved schedule runs all micro-batches as one group.
        settings: the values that are not the first of their setting.
        plan_seed: of the order in the plan file, where the schedule is one, and of what is tried.
    """

    pp: int = 2
    segments: int = 1
    tp: int = 1
    dp: int = 1
    m: int = 2
    iterations: int = 2
    one_group: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    plan_seed: int = 0

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def stages(self) -> int:
        return self.pp * self.segments

    def setting(self, name: str) -> str:
        """Return the value of one of `SHARED` or `OURS`."""
        return self.settings.get(name) or (SHARED.get(name) or OURS[name])[0]

    def without(self, names: Iterator[str] | Sequence[str]) -> "FlagSet":
        """Return the comparison with the first values of some settings."""
        gone = set(names)
        kept = {name: value for name, value in self.settings.items() if name not in gone}
        return replace(self, settings=kept)

    def stock(self) -> tuple[str, ...]:
        """Return the command of stock's run."""
        return self._words("--schedule stock", ONE_GROUP if self.one_group else "")

    def ours(self) -> tuple[str, ...]:
        """Return the command of our run; PLAN and FOLDER stand for files."""
        settings = [self.setting(name) for name in OURS if name != "checkpoint"]
        # What begins with a colon goes on with the word of the schedule; a flag may follow it.
        found = [text.partition(" ")[0] for text in settings if text.startswith(":")]
        if "PLAN" in settings[0]:  # its actions say where weight gradients and recomputation are
            found = [part for part in found if not part.startswith((":wgrad", ":recompute"))]
        words = dict.fromkeys(word for part in found for word in part[1:].split(":"))
        parts = "".join(f":{word}" for word in words)
        flags = [text.partition(" ")[2] if text.startswith(":") else text for text in settings[1:]]
        tried = f"--tried {self.plan_seed}" if "auto" in f"{settings[0]}{parts}" else ""
        groups = ONE_GROUP if self.one_group and settings[0] == AUTO else ""  # stock's order
        return self._words(f"{settings[0]}{parts}", *flags, groups, tried, self.saving("FOLDER"))

    def aiao(self) -> tuple[str, ...]:
        """Return the command of another run of ours, with the checkpoint and no other setting."""
        return self.without(name for name in OURS if "checkpoint" not in name).ours()

    def saving(self, folder: str) -> str:
        """Return the flags of the run that writes a checkpoint, if one is written."""
        return f"--save {folder}/saved --save-interval 2" if self.setting("checkpoint") else ""

    def _words(self, *more: str) -> tuple[str, ...]:
        sequences = int(self.setting("sequences").split()[-1])
        one = sequences * self.dp
        words = [
            MODEL,
            f"--pipeline-model-parallel-size {self.pp} --tensor-model-parallel-size {self.tp}",
            f"--segments {self.segments}",
            self._layers(),
            self._batches(one),
            *(self.setting(name) for name in SHARED if name not in ("layers", "batches")),
            *more,
        ]
        text = " ".join(filter(None, words))
        # Stock's interleaved schedule wants a whole group in evaluation, too.
        few = self.m if self.one_group else self.pp if self.segments > 1 else 1
        sizes = {"m": self.m, "dp": self.dp, "few": few * one, "segments": self.segments - 1}
        for name, value in sizes.items():
            text = text.replace(f"{{{name}}}", str(value))
        return tuple(shlex.split(text))

    def _layers(self) -> str:
        layers = self.setting("layers")
        if layers.startswith("more"):
            _, end = layers.split()
            more = f"--decoder-{end}-pipeline-num-layers {2 * self.segments}"
            return f"--num-layers {self.stages + self.segments} {more}"
        return f"--num-layers {self.stages * (2 if layers == 'two' else 1)}"

    def _batches(self, one: int) -> str:
        if self.setting("batches") != "ramp-up":
            length = f"--train-iters {self.iterations} --lr-decay-iters 10"
            return f"{length} --global-batch-size {self.m * one}"
        # One iteration of a small batch, then of a larger one; thresholds count tokens.
        small = self.pp if self.segments > 1 else 1
        samples = one * (small + self.m * (self.iterations - 1))
        sizes = f"0:{small * one} {8 * small * one}:{self.m * one}"
        return (
            f"--step-batch-size-schedule '{sizes}' --train-samples {samples} "
            f"--lr-decay-samples {10 * samples} --eval-global-batch-size {self.m * one}"
        )


def draw(seed: str, variants: int, having: str = "") -> tuple[list[FlagSet], list[str]]:
    """Draw a run of stock and legal runs of ours beside it; returns them, and what was refused.

    Args:
        seed: the same for the same draw.
        variants: how many runs of ours.
        having: a setting that each run of ours has, if any.
    """
    dice = random.Random(seed)
    refused: list[str] = []
    for _ in range(1000 if having else 100):
        shared = _shared(dice)
        if problems := refusal(shared.stock(), shared.num_ranks):
            refused.append(problems)
            continue
        found: dict[tuple[str, ...], FlagSet] = {}
        for _ in range(40):
            ours = _ours(shared, dice)
            if having and having not in ours.settings:
                continue
            problems = refusal_of(ours) or _another_order(ours)
            if problems:
                refused.append(problems)
            else:
                found.setdefault((*ours.ours(), ours.setting("checkpoint")), ours)
            if len(found) == variants:
                return list(found.values()), refused
        if found:
            return list(found.values()), refused
    raise AssertionError(f"seed {seed}: nothing legal, as {refused[-1:]}")


def _shared(dice: random.Random) -> FlagSet:
    pp, tp, dp = dice.choice(
        [(2, 1, 1)] * 8
        + [(1, 1, 2), (2, 1, 2), (2, 1, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1)]
        + [(1, 1, 3), (2, 1, 3), (1, 2, 2)]
    )
    segments = dice.choice((1, 2, 2, 3)) if pp > 1 else 1
    settings = _some(SHARED, dice)
    if tp == 1:  # stock says no, after a start of its own
        settings.pop("tensor parallel", None)
    elif EXPERTS in " ".join(settings.values()):  # stock wants both
        settings.setdefault("tensor parallel", f"--sequence-parallel {ETP}")
    is_whole = tp > 1 and "tensor parallel" not in settings  # each rank's activations
    if not is_whole and "--distribute" in settings.get("recomputation", ""):
        del settings["recomputation"]
    # Stock gathers a chunk's experts before it has stepped them, so timing decides what it trains.
    races = EXPERTS in " ".join(settings.values())
    if (segments == 1 or races) and "with-optimizer-step" in settings.get("gradients", ""):
        del settings["gradients"]
    if "batches" in settings and "--lr-warmup-iters" in settings.get("optimizer", ""):
        del settings["optimizer"]
    iterations = dice.choice((3, 3, 4, LONG))
    if iterations == LONG and dp * tp > 2:
        settings["checks"] = "--deterministic-mode"
    most = 2 if iterations == LONG else 5
    m, one_group = 1 + dice.randint(0, most), False
    if segments > 1 and "batches" in settings:
        m = pp * dice.randint(1, 3)
    elif segments > 1:  # stock's interleaved schedule takes any number only as one group
        m = dice.randint(pp, pp + most - 1)
        one_group = m % pp > 0 or "draws" in settings or dice.random() < 0.3
    sizes = {"pp": pp, "tp": tp, "dp": dp, "segments": segments, "m": m}
    return FlagSet(**sizes, iterations=iterations, one_group=one_group, settings=settings)


def _ours(shared: FlagSet, dice: random.Random) -> FlagSet:
    some = _some(OURS, dice, boldness=dice.uniform(0.2, 1.4))  # what is bold is mostly refused
    some["schedule"] = dice.choice(OURS["schedule"])
    if shared.iterations == LONG and dice.random() < 0.6:
        also = ("trace", "checkpoint", "checkpoint format")
        some = {name: some[name] for name in also if name in some} | {"schedule": AUTO}
    settings = {**shared.settings, **some}
    in_shards = ZERO in settings.get("gradients", "") and shared.dp > 1
    if not in_shards:  # it would be refused
        settings.pop("coded sums", None)
    if not in_shards or "16" not in settings.get("precision", ""):
        settings.pop("coded gathers", None)
    if "checkpoint" not in settings:
        settings.pop("checkpoint format", None)
    return replace(shared, settings=settings, plan_seed=dice.randrange(1 << 30))


def _some(
    settings: Mapping[str, Sequence[str]], dice: random.Random, boldness: float = 1.0
) -> dict[str, str]:
    return {
        name: dice.choice(values[1:])
        for name, values in settings.items()
        if dice.random() < boldness * CHANCES.get(name, CHANCE)
    }


def _another_order(ours: FlagSet) -> str:
    """Tell why a legal run may draw other random numbers, or other bits, than stock's."""
    schedule = ours.setting("schedule")
    # Of experts, which tensor parallelism may not cut.
    if ours.dp * (ours.tp if EXPERTS in " ".join(ours.settings.values()) else 1) > 2:
        # Sums between weight gradients, which may be in parts.
        parts = (AUTO, "=auto", "wgrad", "zb-")
        loose = "deterministic" not in ours.setting("checks")
        if loose and any(part in " ".join(map(ours.setting, OURS)) for part in parts):
            return "replicas: parts of sums add up in another order without --deterministic-mode"
        if ours.stages > 1 and "--ddp-" in ours.setting("gradients"):
            return "replicas: other buckets add up in another order"
        if any(map(ours.setting, ("deferral", "preemption", "replicated", "slices", "coded sums"))):
            return "replicas: parts of sums add up in another order"
    if ours.setting("draws") and ours.segments > 1:
        at_once = ours.one_group and "interleaved" not in schedule and "PLAN" not in schedule
        keeps = schedule == AUTO or ("interleaved" in schedule and not ours.one_group)
        if "aiao" in ours.setting("checkpoint"):
            keeps = False
        if not keeps and (not at_once or "--moe" in ours.setting("draws")):  # evaluation draws
            return "random numbers are drawn in the order of forwards"
    return ""


def refusal_of(ours: FlagSet) -> str:
    """Return what the project's own checks say to a run of ours, with its plan file if any."""
    if "PLAN" not in ours.setting("schedule"):
        return refusal(ours.ours(), ours.num_ranks)
    with NamedTemporaryFile("w", suffix=".plan") as file:
        file.write(random_plan(ours))
        file.flush()
        words = [word.replace("PLAN", file.name) for word in ours.ours()]
        return refusal(words, ours.num_ranks)


def refusal(words: Sequence[str], num_ranks: int) -> str:
    """Return what the project's own checks say to a command, nothing if they let it pass."""
    text = shlex.join(words)
    try:
        args = _parser().parse_args([*cpu_flags.FLAGS, *shlex.split(text)])
        cpu_flags.check(args)
        with patch.dict(os.environ, {"WORLD_SIZE": str(num_ranks)}):
            problems = [*run_problems(args)]
        read_config(args)
    except (ArgumentError, ValueError) as error:
        return str(error)
    return "\n".join(problems)


@cache
def _parser() -> ArgumentParser:
    parser = ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    add_own_arguments(parser)
    return add_arguments(parser)


def add_own_arguments(parser: ArgumentParser) -> None:
    """Add the flags of a rank that `fuzz` starts, which training does not see."""
    parser.add_argument("--frozen", help="the parameters that are not trained")
    parser.add_argument("--tried", help="a seed of the choices that auto tries")


_OPS = "FRBW"


def random_plan(ours: FlagSet) -> str:
    """Return a plan of which it is only known that it ends: the text of a plan file.

    All ranks together take one action after another, each drawn from those whose inputs are there.
    """
    dice = random.Random(ours.plan_seed)
    _, _, segment = ours.setting("weight gradients").partition("@")
    split = {"": (), "0": (0,)}.get(segment, (ours.segments - 1,))
    early = {"": range(0), ":recompute=early@0": range(ours.pp)}.get(
        ours.setting("early recomputation"), range(ours.stages)
    )
    lean = [dice.choice((1, 1, 3, 10)) for _ in range(ours.pp)]  # towards forwards
    actions = {
        (stage, op, batch)
        for stage, op, batch in product(range(ours.stages), _OPS, range(ours.m))
        if (op != "R" or stage in early) and (op != "W" or stage // ours.pp in split)
    }
    order: TopologicalSorter[tuple[int, str, int]] = TopologicalSorter()
    for stage, op, batch in actions:
        inputs = {
            "F": ((stage - 1, "F"),),
            "R": ((stage, "F"),),
            "B": ((stage, "F"), (stage, "R"), (stage + 1, "B")),
            "W": ((stage, "B"),),
        }[op]
        needs = {(stage, op, batch - 1), *((*place, batch) for place in inputs)}
        order.add((stage, op, batch), *(needs & actions))
    order.prepare()
    programs: list[list[str]] = [[] for _ in range(ours.pp)]
    ready: set[tuple[int, str, int]] = set()
    while order.is_active():
        ready.update(order.get_ready())
        choices = sorted(ready, key=lambda action: (action[0], _OPS.index(action[1])))
        weights = [lean[stage % ours.pp] if op == "F" else 1 for stage, op, _ in choices]
        (action,) = dice.choices(choices, weights)
        ready.remove(action)
        order.done(action)
        stage, op, batch = action
        programs[stage % ours.pp].append(f"{stage}{op}{batch}")
    return "".join(" ".join(program) + "\n" for program in programs)
