"""Each row of the table of refusals refuses its setting beside its value, and no other run."""

import re
from argparse import ArgumentParser, Namespace

import pytest

from megatron.fold3d.config.refusals import STOCKS, TABLE, WITHOUT, refusals, value_of
from megatron.fold3d.config.settings import asked
from tests.config.conftest import Parse

FULL = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
LOCAL = "--transformer-impl local --no-gradient-accumulation-fusion"
SHARDS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
# A word of the schedule and flags for each value; others have `aiao`, and themselves as flags.
RUNS = {
    "another order than stock's": ("aiao", ""),
    "a schedule of ours": ("aiao", ""),
    "a schedule without groups": ("aiao", ""),
    "a schedule with groups": ("interleaved", ""),
    "a plan file": ("plan=plan.txt", ""),
    "--schedule auto": ("auto", SHARDS),
    "ahead=": ("1f1b:ahead=2", ""),
    "ahead=auto": ("1f1b:ahead=auto", ""),
    "share=": ("aiao:share=0.5:step=next", "--overlap-grad-reduce"),
    "step=next": ("aiao:step=next", "--overlap-grad-reduce"),
    "slices=on": ("aiao:slices=on", "--overlap-grad-reduce"),
    "wgrad=": ("aiao:wgrad=last@1", LOCAL),
    "wgrad=gaps": ("aiao:wgrad=gaps", LOCAL),
    "weight gradients apart": ("aiao:wgrad=last@1", LOCAL),
    "weight gradients apart in Megatron's layers": ("aiao:wgrad=last@1", LOCAL),
    "weight gradients apart in Transformer Engine's": ("aiao:wgrad=last@1", ""),
    "recompute=early": ("aiao:recompute=early", FULL),
    "pairs=on": (
        "aiao:pairs=on",
        f"{LOCAL} --tensor-model-parallel-size 2 --attention-dropout 0 --hidden-dropout 0",
    ),
    "optimizer=": ("aiao:optimizer=replicated@1", SHARDS),
    "optimizer=auto": ("aiao:optimizer=auto", f"{SHARDS} {LOCAL}"),
    "optimizer=sharded": ("aiao:optimizer=sharded", SHARDS),
    "--shard-segments": ("aiao", f"--shard-segments weights {SHARDS}"),
    "--shard-segments gradients": ("aiao", f"--shard-segments gradients {SHARDS}"),
    "--coded-grad-reduce on": ("aiao", f"--coded-grad-reduce on {SHARDS}"),
    "--delta-param-gather on": ("aiao", f"--delta-param-gather on --bf16 {SHARDS}"),
    "--recompute-layers": ("aiao", "--recompute-layers 1,1,1,1,1,1"),
    "--offload-activations": ("aiao", f"--offload-activations on {FULL}"),
    "--trace of stock's schedule": ("stock", "--trace new"),
}
# What a setting adds to a word or to flags, if it is neither a part of a word nor a flag's example.
ADDED = {
    "ahead=auto": "ahead=auto",
    "optimizer=": "optimizer=replicated@1",
    "wgrad=": "wgrad=last@1",
    "share=": "share=0.5",
    "wgrad= in the word": "wgrad=last@1",
    "recompute= in the word": "recompute=early",
    "slices= in the word": "slices=on",
    "step=next with measured shares": "step=next",
    "half of tied embeddings": "optimizer=replicated@0",
    "one segment": "--segments 1",
    "--segments auto for given numbers": "--segments auto",
    "full recomputation": FULL,
    "biases": "",
    "one replica": "",
    "gradients in fp16": "--fp16",
    "--optimizer that shards whole layers": "--optimizer muon --use-distributed-optimizer",
    "--tensor-model-parallel-size 1 unless ranks share experts": "--tensor-model-parallel-size 1",
    "--fp8-format with --fp8-recipe delayed": "--fp8-format hybrid",
    "--recompute-modules of the engine": "--recompute-modules mlp",
    "--pipeline-model-parallel-layout with an m before the last stage": (
        "--pipeline-model-parallel-layout Ett|tt|tt|tt,m|L"
    ),
    "--microbatch-group-size-per-virtual-pipeline-stage below the ranks": (
        "--microbatch-group-size-per-virtual-pipeline-stage 1"
    ),
    "--tensor-parallel-num-weight-shards above the ranks": "--tensor-parallel-num-weight-shards 2",
    "--expert-tensor-parallel-num-weight-shards above the ranks": (
        "--expert-tensor-parallel-num-weight-shards 2"
    ),
    "--shard-segments": "--shard-segments weights",
    "--offload-activations": "--offload-activations on",
    "--moe-router-force-biased": "--moe-router-force-biased 0",  # it draws, too
    "--rampup-batch-size": "--rampup-batch-size 2 2 8",
    "--cuda-graph-impl": "--cuda-graph-impl local",
}
OTHER = {
    "--optimizer": "muon",
    "--transformer-impl": "inference_optimized",
    "--recompute-method": "uniform",
    "--moe-token-dispatcher-type": "allgather",
}
# What a setting takes away.
DROPPED = {
    "parameters in fp32": "--bf16",
    "fused weight gradients": "--no-gradient-accumulation-fusion",
    "recomputation": FULL,
    "--recompute-granularity full": FULL,
}
ROWS = [
    (form, setting, why)
    for form, reasons in TABLE.items()
    for settings, why in reasons.items()
    for setting in ([settings] if settings.startswith(WITHOUT) else settings.split(", "))
    if setting not in ("Transformer Engine before 2.8", "Megatron-Bridge")  # no flag sets them
]


def parsed(parse: Parse, word: str, flags: str) -> Namespace:
    return parse(f"--num-layers 12 --segments 3 --schedule {word} {flags}")


def of_value(value: str) -> tuple[str, str]:
    return RUNS.get(value, ("aiao", value))


def example(parse: Parse, setting: str) -> str:
    """What gives a setting: a part of a word, or flags."""
    if " and " in setting:
        return " ".join(example(parse, part) for part in setting.split(" and "))
    if setting in ADDED or not setting.startswith("--"):
        return ADDED.get(setting, setting)
    flag, *rest = setting.split()
    if rest[:1] == ["other"]:
        return f"{flag} {OTHER[flag]}"
    if rest[:1] == ["above"]:
        return f"{flag} {int(rest[1]) + 1}"
    if rest:
        return setting
    for value in ("", " 2", " hybrid", " e2m1", " path"):
        try:
            parse(f"{flag}{value}")
        except (SystemExit, ValueError):
            continue
        return f"{flag}{value}"
    raise AssertionError(f"give an example of {setting}")


@pytest.mark.parametrize("value", sorted({*map(value_of, TABLE)}))
def test_a_value_alone_is_refused_by_no_row(parse: Parse, value: str) -> None:
    word, flags = of_value(value)
    args = parsed(parse, word, flags)
    assert asked(args, value)
    assert [*refusals(args)] == []


@pytest.mark.parametrize(("form", "setting", "why"), ROWS)
def test_each_row_refuses_its_setting(parse: Parse, form: str, setting: str, why: str) -> None:
    value = value_of(form)
    word, flags = of_value(value)
    if setting == STOCKS:
        _, *parts = word.split(":")
        args = parsed(parse, ":".join(["stock", *parts]), flags)
        refused = f"{asked(args, value)} with --schedule stock: {why}"
    elif setting.startswith(WITHOUT):
        needed = setting.removeprefix(WITHOUT).split(" and ")
        for part in needed:
            if "=" in part:
                word = word.replace(f":{part}", "")
            flags = flags.replace(DROPPED.get(part, part), "")
        args = parsed(parse, word, flags)
        fix = why.replace("{}", " ".join(needed))
        refused = f"{asked(args, value)} without {' and '.join(needed)}: {fix}"
    else:
        added = "" if setting in DROPPED else example(parse, setting)
        if "=" in added.split(" ")[0] and not added.startswith("--"):
            word, added = f"{word}:{added}", ""
        elif setting == "a plan file":
            word, added = word.replace("aiao", "plan=plan.txt"), ""
        elif added.startswith("--schedule"):
            word, added = word.replace("aiao", added.split()[1]), ""
        args = parsed(parse, word, f"{flags.replace(DROPPED.get(setting, '!'), '')} {added}")
        if setting == "one replica":
            args.data_parallel_size = 1
        form = form.replace(value, asked(args, value))
        refused = f"{form.replace('{}', asked(args, setting))}: {why}"
    assert refused in [*refusals(args)]


def test_what_a_row_advises_are_flags_of_the_installed_megatron(parser: ArgumentParser) -> None:
    flags = {flag for action in parser._actions for flag in action.option_strings}
    advised = {flag for _, _, why in ROWS for flag in re.findall(r"--[a-z0-9-]+", why)}
    assert advised <= flags
