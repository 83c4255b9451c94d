"""A user's own Megatron flags, from a command line or a shell script, as the planner's model.

Nothing is run: flags are read as words, and variables are replaced if the script sets them itself.
A flag that changes the model in a way that the planner does not model is refused; flags that do
not matter to it are ignored.
"""

import re
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.fold3d.observe.fields import read_text
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, model_shape
from megatron.fold3d.predict.cost_model.presets import preset_flags

# Fields of a shape, by the flag that says them.
_SIZES = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "num-attention-heads": "num_attention_heads",
    "seq-length": "seq_length",
    "max-position-embeddings": "max_positions",
    "ffn-hidden-size": "ffn_hidden_size",
    "kv-channels": "kv_channels",
    "num-experts": "num_experts",
    "moe-ffn-hidden-size": "expert_ffn_hidden_size",
    "moe-shared-expert-intermediate-size": "shared_expert_ffn_hidden_size",
}
# Likewise, with Megatron's defaults, where attention is multi-latent.
_LATENT = {
    "q-lora-rank": 0,
    "kv-lora-rank": 32,
    "qk-head-dim": 128,
    "qk-pos-emb-head-dim": 64,
    "v-head-dim": 128,
}
# What the search does not choose, with values if not given.
_SHARED = {
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": 0,
}
_NEEDED = ("num-layers", "hidden-size", "num-attention-heads", "seq-length", "global-batch-size")
_NOT_MODELLED = {
    "hybrid-layer-pattern": "layers that are no transformer's",
    "mtp-num-layers": "the layers of multi-token prediction",
    "heterogeneous-layers-config-path": "layers that differ",
    "heterogeneous-layers-config-encoded-json": "layers that differ",
    "yaml-cfg": "a file of options",
}
# What `_shape` reads beside these.
_OTHERS = (
    *(
        "multi-latent-attention",
        "vocab-size",
        "make-vocab-size-divisible-by",
        "swiglu",
        "position-embedding-type",
    ),
    *("moe-layer-freq", "untie-embeddings-and-output-weights", "num-query-groups"),
    *("group-query-attention", "rotary-base", "normalization", "add-qkv-bias", "moe-router-topk"),
    "qk-layernorm",
)
_UNEVEN = (
    *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
    "pipeline-model-parallel-layout",
)
LOCAL_FP32 = "--ddp-param-name-patterns-for-fp32-local-accumulation"
SCATTER_FP32 = "--ddp-reduce-scatter-with-fp32-accumulation"
_DEFAULT_VOCABULARY = 51_200
_VARIABLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\$(\w+)")
_ASSIGNMENT = re.compile(r"\s*(?:export\s+|local\s+|readonly\s+)?(\w+)\+?=(.*)", re.S)
_FREQUENCY = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What flags say about a run.

    Attributes:
        shape: the model.
        global_batch_size: sequences per iteration.
        fp32: whether neither 16-bit type is asked for.
        fp16: whether it is fp16.
        context_parallel: ranks that share a sequence, which the search does not choose.
        expert_parallel: ranks that share the experts of a layer, likewise.
        expert_tensor_parallel: ranks that share each expert, likewise; 0 if none are asked for.
        small_gradients: whether gradients are summed in 16 bits.
        accumulates_in_fp32: whether micro-batches are added up in 32 nonetheless.
        scatters_in_fp32: whether the shards of replicas are.
        notes: the flags that were read, and the values that are assumed; one line each.
        words: all of them; a script's are not flags alone.
        flags: by name, each flag's first value, with those of a preset.
        script: the file, if they were read from one.
    """

    shape: ModelShape
    global_batch_size: int
    fp32: bool
    fp16: bool
    context_parallel: int
    expert_parallel: int
    expert_tensor_parallel: int
    small_gradients: bool
    accumulates_in_fp32: bool
    scatters_in_fp32: bool
    notes: tuple[str, ...]
    words: tuple[str, ...]
    flags: Mapping[str, str]
    script: Path | None = None


def add_training_flags(parser: ArgumentParser, purpose: str) -> None:
    """Add a training's flags behind ``--``, or in a shell script."""
    parser.add_argument(
        "flags", nargs="*", metavar="FLAGS", help=f"behind --, the flags of a training: {purpose}"
    )
    parser.add_argument(
        "--from-script",
        type=Path,
        metavar="FILE",
        help="likewise, from a shell script that starts a training",
    )


def given_training(args: Namespace) -> Described:
    """Return what the training flags of a command say.

    Raises:
        ValueError: as below.
        OSError: the script cannot be read.
    """
    if args.flags and args.from_script is not None:
        raise ValueError("flags behind -- with --from-script: both say the training; drop one")
    if args.from_script is not None:
        return from_script(args.from_script)
    return described(args.flags, "the command line")


def from_flags(line: str) -> Described:
    """Read one line of flags.

    Raises:
        ValueError: flags are missing, no numbers, or ask for what is not modelled.
    """
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"{line!r}: {error}; quote the flags as one word") from None
    return described(words, "the command line")


def from_script(file: Path) -> Described:
    """Read the flags in a shell script that starts a training.

    Raises:
        ValueError: as above.
        OSError: the file cannot be read.
    """
    return replace(described([*_script_words(read_text(file))], str(file)), script=file)


def shape_of(args: Namespace) -> ModelShape:
    """Return the model of Megatron's namespace, validated.

    Raises:
        ValueError: it asks for what is not modelled.
    """
    flags: dict[str, str] = {}
    for name in (*_SIZES, *_NOT_MODELLED, *_LATENT, *_OTHERS):
        value = getattr(args, name.replace("-", "_"), None)
        if value is not None and value is not False:
            flags[name] = "" if value is True else str(value)
    if getattr(args, "padded_vocab_size", None):  # at which validation has rounded up
        flags["vocab-size"] = str(args.padded_vocab_size)
    if not args.add_bias_linear:
        flags["disable-bias-linear"] = ""
    if isinstance(pattern := getattr(args, "moe_layer_freq", 1), list):
        dense = pattern.index(1) if 1 in pattern else len(pattern)
        flags["moe-layer-freq"] = f"([0]*{dense}+[1]*{len(pattern) - dense})"
        if sorted(pattern) != pattern:
            flags["moe-layer-freq"] = str(pattern)
    _check_modelled(flags, "the model")
    return _shape(flags, "the model")[0]


def _script_words(text: str) -> Iterator[str]:
    """Yield the words of a script; of its variables those that it gives a value."""
    values: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", text).splitlines():
        assigned = _ASSIGNMENT.fullmatch(line)
        if assigned and not assigned[2].lstrip().startswith("("):
            value = " ".join(_words(assigned[2], values))
            values[assigned[1]] = value
            line = value if "--" in value else ""
        elif assigned:
            line = assigned[2].strip().strip("()")
        yield from _words(line, values)


def _words(line: str, values: Mapping[str, str]) -> Iterator[str]:
    try:
        found = shlex.split(line, comments=True)
    except ValueError:  # a quote that another line closes
        found = line.replace('"', " ").replace("'", " ").split()
    for word in found:
        yield from _VARIABLE.sub(
            lambda name: values.get(name[1] or name[3], (name[2] or "").strip("\"'")), word
        ).split()


def described(words: Sequence[str], source: str) -> Described:
    """Return what flags say; ``source`` is where they come from, for messages.

    Raises:
        ValueError: flags are missing, no numbers, or ask for what is not modelled.
    """
    flags, twice = _flags(words)
    if name := flags.get("model-preset"):
        flags, twice = _flags([*words, *preset_flags(name, model_shape(name).family)])
    if missing := [f"--{name}" for name in _NEEDED if not flags.get(name)]:
        raise ValueError(
            f"{source} has no {', '.join(missing)}; the model and the batch are read from them"
        )
    _check_modelled(flags, source)
    shape, assumed = _shape(flags, source)
    fp16 = "fp16" in flags
    precision = "fp16" if fp16 else "bf16" if "bf16" in flags else "32 bits"
    if any(name.startswith(("fp8-", "fp4-")) for name in flags):
        assumed.append("fp8 and fp4 compute as fast as 16 bits")
    kept = [n for n in ("tensor-model-parallel-size", "pipeline-model-parallel-size") if n in flags]
    if kept:
        own = ", ".join(f"--{name} {flags[name]}" for name in kept)
        assumed.append(f"the search chooses sizes anew, instead of {own}; --tp and --pp keep them")
    if uneven := [n for n in _UNEVEN if n in flags]:
        own = " and ".join(f"--{name}" for name in uneven)
        assumed.append(f"the search divides the layers itself, instead of {own}")
    assumed += [f"--{name} is there several times; the last counts" for name in twice]
    shared = {name: number(flags, name, other) for name, other in _SHARED.items()}
    fixed = [f"--{name} {n}" for name, n in shared.items() if n > 1 or n != _SHARED[name]]
    if fixed:
        assumed.append(
            f"{' and '.join(fixed)} stay; no computation hides what these ranks exchange"
        )
    small = precision != "32 bits" and not _sums_in_32_bits(flags, fp16=fp16)
    batch = number(flags, "global-batch-size")
    notes = [
        f"read from {source}: {_in_words(shape)}, {batch} sequences per iteration, {precision}",
        *(f"assumed: {line}" for line in assumed),
    ]
    return Described(
        shape=shape,
        global_batch_size=batch,
        fp32=precision == "32 bits",
        fp16=fp16,
        context_parallel=shared["context-parallel-size"],
        expert_parallel=shared["expert-model-parallel-size"],
        expert_tensor_parallel=shared["expert-tensor-parallel-size"],
        small_gradients=small,
        accumulates_in_fp32=small and LOCAL_FP32[2:] in flags,
        scatters_in_fp32=small and SCATTER_FP32[2:] in flags,
        notes=tuple(notes),
        words=tuple(words),
        flags=flags,
    )


def _sums_in_32_bits(flags: Mapping[str, str], *, fp16: bool) -> bool:
    if fp16:
        return "accumulate-allreduce-grads-in-fp32" in flags
    in_16_bits = flags.get("main-grads-dtype", "fp32") != "fp32"
    return not (in_16_bits or "grad-reduce-in-bf16" in flags)


def _check_modelled(flags: Mapping[str, str], source: str) -> None:
    for name, what in _NOT_MODELLED.items():
        if name in flags:
            raise ValueError(f"{source}: --{name}: the planner does not model {what}; drop it")


def _flags(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return each flag's first value, and which flags of a model have two values."""
    flags: dict[str, str] = {}
    twice: list[str] = []
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, _, value = word[2:].partition("=")
            before, flags[name] = flags.get(name), value
        elif name and not flags[name]:
            flags[name] = word
            if before not in (None, "", word) and name in (*_SIZES, *_NEEDED):
                twice.append(name)
    return flags, twice


def _shape(flags: Mapping[str, str], source: str) -> tuple[ModelShape, list[str]]:
    assumed = []
    sizes: dict[str, Any] = {
        field: number(flags, name) for name, field in _SIZES.items() if name in flags
    }
    vocabulary = number(flags, "vocab-size") if "vocab-size" in flags else 0
    if not vocabulary:
        assumed.append(
            f"a vocabulary of {_DEFAULT_VOCABULARY}; --vocab-size is not among the flags"
        )
    unit = number(flags, "make-vocab-size-divisible-by", 128)
    swiglu = "swiglu" in flags
    if swiglu and "ffn-hidden-size" not in flags:  # as Megatron derives it
        sizes["ffn_hidden_size"] = int(4 * sizes["hidden_size"] * 2 / 3 / 64) * 64
    rotary = flags.get("position-embedding-type", "learned_absolute") != "learned_absolute"
    if "multi-latent-attention" in flags:
        sizes |= {n.replace("-", "_"): number(flags, n, size) for n, size in _LATENT.items()}
        flags = {name: value for name, value in flags.items() if name != "group-query-attention"}
    experts = sizes.get("num_experts", 0)
    dense = _FREQUENCY.fullmatch(flags.get("moe-layer-freq", "1").replace(" ", ""))
    if experts and dense is None and flags.get("moe-layer-freq", "1") != "1":
        raise ValueError(
            f"{source}: --moe-layer-freq {flags['moe-layer-freq']}: the planner models layers "
            "without experts before those with experts; give ([0]*N+[1]*M)"
        )
    return ModelShape(
        name="flags",
        **sizes,
        vocab_size=-(-vocabulary // unit) * unit or _DEFAULT_VOCABULARY,
        untied="untie-embeddings-and-output-weights" in flags,
        num_query_groups=(
            number(flags, "num-query-groups", 1) if "group-query-attention" in flags else 0
        ),
        swiglu=swiglu,
        rotary_base=number(flags, "rotary-base", 10_000) if rotary else 0,
        rms_norm=flags.get("normalization") == "RMSNorm",
        biases="disable-bias-linear" not in flags,
        qkv_bias="add-qkv-bias" in flags,
        qk_norm="qk-layernorm" in flags,
        vocab_unit=unit,
        experts_per_token=number(flags, "moe-router-topk", 2) if experts else 0,
        num_dense_layers=int(dense[1]) if dense and experts else 0,
    ), assumed


def number(flags: Mapping[str, str], name: str, otherwise: int = 0) -> int:
    """Return a flag's whole number.

    Raises:
        ValueError: it has none.
    """
    text = flags.get(name, str(otherwise))
    if not re.fullmatch(r"\d+", text):
        raise ValueError(f"found --{name} {text or 'without a value'}; it is a whole number")
    return int(text)


def _in_words(shape: ModelShape) -> str:
    heads = f"{shape.num_attention_heads} heads"
    if shape.num_query_groups:
        heads += f" ({shape.num_query_groups} of keys and values)"
    if shape.is_latent:
        heads += f" of multi-latent attention ({shape.kv_lora_rank} of keys and values)"
    experts = (
        f", {shape.num_experts} experts of which a token passes {shape.experts_per_token}"
        if shape.num_experts
        else ""
    )
    return (
        f"{shape.num_layers} layers of {shape.hidden_size}, {heads}, "
        f"{'gated ' if shape.swiglu else ''}feed-forward layers of {shape.ffn_size}{experts}, "
        f"sequences of {shape.seq_length}, a vocabulary of {shape.vocab_size}: "
        f"{shape.num_parameters / 1e9:.1f} billion parameters"
    )
