"""A user's own Megatron flags, from a command line or a shell script, as the planner's model.

A flag that changes the model in a way that the planner does not model is refused; flags that do not
matter to it are ignored.
"""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.fold3d.commands.script_words import ScriptWords, reasons_of, script_words
from megatron.fold3d.commands.training_words import (
    LATENT,
    NOT_MODELLED,
    SIZES,
    help_of_flags,
    not_counted,
    read_words,
    unread,
    values_of,
)
from megatron.fold3d.config.settings import attribute_of
from megatron.fold3d.config.spelling import flag_of, typed
from megatron.fold3d.observe.fields import read_text
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.model_shape import MOST_LAYERS, ModelShape, model_shape
from megatron.fold3d.predict.cost_model.presets import preset_flags
from megatron.fold3d.predict.cost_model.sizes import Recompute

# Flags whose values have to be known, since the model or the batch depends on them.
_OF_MODEL = (
    *(*SIZES, *NOT_MODELLED, *LATENT, "num_query_groups", "moe_router_topk", "moe_layer_freq"),
    *("position_embedding_type", "normalization", "softmax_type", "global_batch_size"),
)
_SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
_NEEDED = (*_SHAPE, "global_batch_size")
_DEFAULT_VOCABULARY = 51_200
_TERM = re.compile(r"\[(\d{1,9}(?:, ?\d{1,9})*)\](?: ?\* ?(\d{1,9}))?")
# Flags that a script should have once.
_ALONE = (*_NEEDED, "tensor_model_parallel_size", "pipeline_model_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What flags say about a run.

    Attributes:
        args: the namespace of the flags, with defaults for those that are not given.
        typed: the namespace of only those flags that were typed for a command.
        shape: the model; None if no flag says any of it.
        source: where the flags come from, for messages.
        words: all flags; of a script, also its other words.
        own_words: the same without the flags that were typed for a command.
        script: the file, if they were read from one.
        remarks: what could not be read in the script, or is uncertain.
    """

    args: Namespace
    typed: Namespace
    shape: ModelShape | None
    source: str
    words: tuple[str, ...]
    own_words: tuple[str, ...]
    script: Path | None = None
    remarks: tuple[str, ...] = ()

    def given(self, cluster: Cluster | None = None) -> dict[str, Any]:
        """Return what the search does not choose: typed sizes, and what it never chooses."""
        args, typed = self.args, self.typed
        layers = layers_of(args, cluster)
        sizes = {
            "tensor_parallel": typed.tp,
            "data_parallel": typed.dp,
            "num_ranks": typed.pp,
            "num_segments": None if typed.segments == AUTO else typed.segments,
            "microbatch_size": typed.micro_batch_size,
            "recompute": typed.recompute and recompute_of(args, layers),
            "context_parallel": self._fixed("context_parallel_size"),
            "expert_parallel": self._fixed("expert_model_parallel_size"),
            "expert_tensor_parallel": args.expert_tensor_parallel_size,
        }
        given = {name: value for name, value in sizes.items() if value is not None}
        return given | precision_of(args) | layers

    def _fixed(self, name: str) -> int | None:
        """Return a size that the flags give; None leaves it to the search."""
        return getattr(self.args, name) if flag_of(name) in values_of(self.words) else None

    @property
    def typed_words(self) -> tuple[str, ...]:
        """The flags that were typed for a command."""
        return self.words[len(self.own_words) :]

    @property
    def is_job(self) -> bool:
        """Whether these are the flags of a whole training, which has a micro-batch size."""
        return self.script is not None or "--micro-batch-size" in values_of(self.own_words)

    def model(self) -> ModelShape:
        """Return the model.

        Raises:
            ValueError: no flag, or not all flags of a model are given.
        """
        if self.shape is None:
            raise ValueError(
                f"{self.source} has no model: give --model NAME, or a training's flags behind --, "
                "or --from-script FILE"
            )
        return self.shape

    def notes(self) -> tuple[str, ...]:
        """Return what was read, and what is assumed; nothing of a model with a name."""
        args = self.args
        if args.model is not None:
            return ()
        precision = "fp16" if args.fp16 else "bf16" if args.bf16 else "32 bits"
        left = ", ".join(not_counted(args))
        return (
            f"read from {self.source}: {_in_words(self.model())}, {args.global_batch_size} "
            f"sequences per iteration, {precision}",
            *(f"assumed: {line}" for line in _assumed(args, self.words, self.typed)),
            *self.remarks,
            *([f"not in these estimates: {left}"] if left else ()),
        )


def add_training_flags(parser: ArgumentParser, rule: str = "") -> None:
    """Let a command read a training's flags: typed, behind ``--``, or in a script.

    Args:
        rule: what the command does with some of them, for the help.
    """
    flags = parser.add_argument_group("flags of a training", help_of_flags(rule))
    flags.add_argument(
        "--from-script",
        type=Path,
        help="the flags in a shell script that starts a training",
    )
    parser.set_defaults(words=((), ()))


def given_training(args: Namespace) -> Described:
    """Return what the training flags of a command say.

    Raises:
        ValueError: as `described`, or flags are given twice.
        OSError: the script cannot be read.
    """
    (typed, words), script = args.words, args.from_script
    if script is None:
        return described(words, typed=typed)
    if words:
        raise ValueError("flags behind -- with --from-script: both say the training; drop one")
    read = script_words(read_text(script))
    remarks = tuple(_remarks(read, typed, script))
    return replace(described(read.words, typed=typed, script=script), remarks=remarks)


def _remarks(read: ScriptWords, typed: Sequence[str], script: Path) -> Iterator[str]:
    """Yield what could not be read in a script.

    Raises:
        ValueError: it is a flag of the model or of the batch.
    """
    for flag, value in unread(read.words, typed).items():
        found = f"{flag} {value} could not be read ({reasons_of(value, read.reasons)})"
        if attribute_of(flag) in _OF_MODEL:
            raise ValueError(f"{script}: {found}; give {flag} behind --from-script {script}")
        yield f"not read: {found}"
    known = vars(read_words(())).keys()
    if flags := [flag for flag in read.undecided if attribute_of(flag) in known]:
        yield (
            f"assumed: {', '.join(flags)}, from branches of {script} of which it is not known "
            "whether they are taken; those with most flags count"
        )


def described(
    words: Sequence[str], *, typed: Sequence[str] = (), script: Path | None = None
) -> Described:
    """Return what flags say.

    Args:
        typed: flags that were typed for a command.

    Raises:
        ValueError: flags are missing, no numbers, or ask for what is not modelled.
    """
    source = str(script) if script else "the command line"
    args = read_words(words, typed)
    if args.model_preset:
        family = model_shape(args.model_preset).family
        args = read_words([*preset_flags(args.model_preset, family), *words], typed)
    shape = None
    if args.model is not None:
        if args.num_layers:
            raise ValueError("--model with --num-layers: both say the model; drop one of the two")
        shape = model_shape(args.model)
        for name, field in SIZES.items():
            setattr(args, name, getattr(shape, field) or None)
        args.bf16 = not (args.fp32 or args.fp16)
        args.untie_embeddings_and_output_weights = shape.untied
    elif any(getattr(args, name) for name in _SHAPE):
        missing = [name for name in _NEEDED if not getattr(args, name)]
        if args.microbatches is not None and missing[-1:] == ["global_batch_size"]:
            missing.pop()
        if missing:
            flags = ", ".join(map(flag_of, missing))
            raise ValueError(f"{source} has no {flags}; the model and the batch are read from them")
        shape = shape_of(args)
    else:
        args.untie_embeddings_and_output_weights = True  # without a model there are no embeddings
    args.accumulate_allreduce_grads_in_fp32 = not _has_small_gradients(args)
    return Described(
        args=args,
        typed=read_words((), typed),
        shape=shape,
        source=source,
        words=(*words, *typed),
        own_words=tuple(words),
        script=script,
    )


def _has_small_gradients(args: Namespace) -> bool:
    """Tell whether gradients are summed in 16 bits: fp16 does by default, bf16 if flags say so."""
    if args.fp16:
        return not args.accumulate_allreduce_grads_in_fp32
    return bool(args.bf16 and (args.main_grads_dtype != "fp32" or args.grad_reduce_in_bf16))


def precision_of(args: Namespace) -> dict[str, Any]:
    """Return the fields of `Setup` that say in how many bits gradients are summed."""
    is_small = (args.bf16 or args.fp16) and not args.accumulate_allreduce_grads_in_fp32
    local = bool(args.ddp_param_name_patterns_for_fp32_local_accumulation)
    return {
        "fp32": not (args.bf16 or args.fp16),
        "small_gradients": is_small,
        "accumulates_in_fp32": is_small and local,
        "scatters_in_fp32": is_small and args.ddp_reduce_scatter_with_fp32_accumulation,
    }


def layers_of(args: Namespace, cluster: Cluster | None = None) -> dict[str, bool]:
    """Return the fields of `Setup` that say whose layers compute, and if their attention is fused.

    Transformer Engine's is, unless a flag says `unfused`, on the GPUs that have bf16.
    """
    backend = getattr(args.attention_backend, "name", args.attention_backend)
    is_fused = args.transformer_impl == "transformer_engine" and backend != "unfused"
    is_fused &= cluster is None or cluster.has_bf16
    return {"local_layers": args.transformer_impl == "local", "keeps_scores": not is_fused}


def recompute_of(args: Namespace, layers: Mapping[str, bool]) -> Recompute:
    """Return what is recomputed. Attention that keeps no scores always recomputes them.

    Args:
        layers: what `layers_of` says.
    """
    asked: Recompute | None = args.recompute_granularity
    return asked or ("none" if layers["keeps_scores"] else "selective")


def shape_of(args: Namespace) -> ModelShape:
    """Return the model of Megatron's namespace, as parsed or as validated.

    Raises:
        ValueError: it asks for what is not modelled.
    """
    for name, what in NOT_MODELLED.items():
        if getattr(args, name, None):
            raise ValueError(f"{flag_of(name)}: the planner does not model {what}; drop it")
    sizes: dict[str, Any] = {
        field: size
        for name, field in SIZES.items()
        if (size := getattr(args, name, None)) is not None
    }
    if args.swiglu and args.ffn_hidden_size is None:  # as Megatron derives it; zero below 24
        sizes["ffn_hidden_size"] = int(4 * args.hidden_size * 2 / 3 / 64) * 64
    latent = bool(args.multi_latent_attention)
    if latent:
        sizes |= {name: getattr(args, name) or 0 for name in LATENT}
    grouped = args.group_query_attention and not latent
    rotary = args.position_embedding_type != "learned_absolute"
    rotary |= args.use_rotary_position_embeddings
    padded = getattr(args, "padded_vocab_size", None)  # given, or what validation rounded up
    unit = 1 if padded else args.make_vocab_size_divisible_by
    vocabulary = padded or args.vocab_size or 0
    experts = bool(args.num_experts)
    return ModelShape(
        name="this model",
        **sizes,
        vocab_size=-(-vocabulary // unit) * unit or _DEFAULT_VOCABULARY,
        untied=bool(args.untie_embeddings_and_output_weights),
        num_query_groups=args.num_query_groups if grouped else 0,
        swiglu=bool(args.swiglu or args.quick_geglu),
        rotary_base=args.rotary_base if rotary else 0,
        rms_norm=args.normalization == "RMSNorm",
        biases=bool(args.add_bias_linear),
        qkv_bias=bool(args.add_qkv_bias),
        qk_norm=bool(args.qk_layernorm),
        output_gate=bool(args.attention_output_gate),
        learned_sinks=args.softmax_type == "learnable",
        shared_expert_gate=bool(args.moe_shared_expert_gate),
        vocab_unit=unit,
        experts_per_token=args.moe_router_topk if experts else 0,
        num_dense_layers=_num_dense_layers(args) if experts else 0,
    )


def _num_dense_layers(args: Namespace) -> int:
    """Return the layers before those with experts.

    Raises:
        ValueError: layers without experts follow, or the flag has another number of layers.
    """
    given = args.moe_layer_freq  # text, or evaluated by Megatron's parser
    if str(given) == "1":
        return 0
    pattern = given if isinstance(given, list) else _pattern(str(given))
    if not pattern or sorted(pattern) != pattern or {*pattern} - {0, 1}:
        raise ValueError(
            f"--moe-layer-freq {given}: the planner models layers without experts before those "
            "with experts; give ([0]*N+[1]*M)"
        )
    if len(pattern) != args.num_layers:
        raise ValueError(
            f"--moe-layer-freq {given}: it is of {len(pattern)} layers, and --num-layers is "
            f"{args.num_layers}; give one 0 or 1 for each"
        )
    return pattern.count(0)


def _pattern(text: str) -> list[int]:
    """Return the list that ``[0]*3+[1]*58`` stands for; an empty one for any other text."""
    terms = [*map(_TERM.fullmatch, re.split(r"\s*\+\s*", text.strip("() ")))]
    return [
        int(number)
        for term in (terms if all(terms) else ())
        if term is not None
        for _ in range(min(int(term[2] or 1), MOST_LAYERS))
        for number in term[1].split(",")
    ]


def _assumed(args: Namespace, words: Sequence[str], typed_: Namespace) -> Iterator[str]:
    """Yield what a prediction assumes beside what flags say."""
    if not (args.vocab_size or args.padded_vocab_size):
        yield f"a vocabulary of {_DEFAULT_VOCABULARY}; --vocab-size is not among the flags"
    if args.fp8 or args.fp4:
        yield "fp8 and fp4 compute as fast as 16 bits"
    sizes = {"--tp": "--tensor-model-parallel-size", "--pp": "--pipeline-model-parallel-size"}
    values = values_of(words)
    chosen = {
        short: f"{name} {values[name][-1]}"
        for short, name in sizes.items()
        if name in values and getattr(typed_, short[2:]) is None
    }
    if chosen:
        kept = f"{' and '.join(chosen)} {'keeps it' if len(chosen) == 1 else 'keep them'}"
        yield f"the search chooses sizes anew, instead of {', '.join(chosen.values())}; {kept}"
    uneven = (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    )
    if own := [flag_of(name) for name in uneven if getattr(args, name)]:
        yield f"the search divides the layers itself, instead of {' and '.join(own)}"
    for flag in map(flag_of, _ALONE):
        if len({*values.get(flag, ())}) > 1:
            yield f"{flag} is there several times; the last counts"
    shared = {
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
    }
    if fixed := [
        typed(flag_of(name), getattr(args, name))
        for name, default in shared.items()
        if getattr(args, name) != default
    ]:
        yield f"{' and '.join(fixed)} stay as they are"


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
