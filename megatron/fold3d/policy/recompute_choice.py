"""The fewest layers of each stage to recompute so that a rank's activations fit into memory.

A kept layer holds all its activations from its forward to its backward; a recomputed layer holds
only its input. A stage that holds few micro-batches at a time can keep its layers, one that holds
many cannot. AIAO's last segment holds few micro-batches and the other segments many, so one number
for a whole rank is not enough. Each kept layer saves the same time, one recomputation per
micro-batch. So a rank's best choice keeps the most layers for which its memory has room. Ranks do
not share memory and choose for themselves (Merak Sec. 5.2, extended from ranks to segments).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.fold3d.plan.ir import WHOLE, Op, Program
from megatron.fold3d.plan.ops import WEIGHT_OPS
from megatron.fold3d.plan.passes.weight_grads import split_stages


class StageBytes(NamedTuple):
    """The bytes that one micro-batch's forward of a stage keeps for its backward.

    Attributes:
        recomputed: the bytes of the stage if all of its layers are recomputed.
        kept: the bytes that each layer adds if it is not recomputed.
    """

    layers: int
    recomputed: float
    kept: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CountsChoice:
    """The number of layers that each stage of a rank recomputes, and the peak memory.

    Attributes:
        peak_bytes: saved and recomputed activations at the peak.
    """

    recomputed: Mapping[int, int]
    peak_bytes: float


class _Moment(NamedTuple):
    """An action that frees activations, or an early recomputation, at which memory may peak.

    Attributes:
        live: by stage, the micro-batches of which only the kept layers are held.
        fixed: bytes that no choice can free: inputs, and all layers of early recomputations.
        recomputing: the stage whose backward recomputes layer by layer. The kept layers are the
            last ones, whose backward is over by then, so memory grows only if no layer is kept.
    """

    live: tuple[tuple[int, int], ...]
    fixed: float
    recomputing: int | None

    def bytes(self, stages: Mapping[int, StageBytes], kept: Mapping[int, int]) -> float:
        """Return the bytes of the rank's activations, with the numbers of kept layers by stage."""
        layers = sum(count * kept[stage] for stage, count in self.live)
        alone = self.recomputing
        layers += alone is not None and kept[alone] == 0 < stages[alone].layers
        return self.fixed + layers * _kept_layer_bytes(stages)

    def covers(self, other: "_Moment") -> bool:
        """Tell whether this moment takes at least another's bytes, whatever layers are kept."""
        of_both = other.recomputing in (None, self.recomputing)
        live = dict(self.live)
        holds = all(live.get(stage, 0) >= count for stage, count in other.live)
        return of_both and holds and self.fixed >= other.fixed


def fewest_counts(
    program: Program,
    stages: Mapping[int, StageBytes],
    limit: float,
    *,
    beside: float = 0.0,
    in_backwards: bool = True,
) -> CountsChoice:
    """Return the fewest layers of each stage that have to be recomputed.

    Of several such choices, the one with the lowest peak memory is returned.

    Args:
        limit: the most bytes of saved activations and ``beside`` together.
        beside: bytes that stay, such as parameters.
        in_backwards: whether to count the layer that a backward recomputes. If weight gradients are
            split from their backwards, ``beside`` has to include this layer instead.

    Raises:
        ValueError: memory has no room even if all layers are recomputed.
    """
    layers = {stage: size.layers for stage, size in stages.items()}
    moments = _worst_moments(program, stages, in_backwards=in_backwards)
    limit -= beside
    all_kept = _peak(moments, stages, layers)
    if all_kept <= limit:
        return CountsChoice(recomputed=dict.fromkeys(layers, 0), peak_bytes=all_kept)
    if (least := _peak(moments, stages, dict.fromkeys(layers, 0))) > limit:
        raise ValueError(
            f"found {beside + least:.0f} bytes with all layers recomputed, and "
            f"{beside + limit:.0f} bytes of memory; raise --pipeline-model-parallel-size or "
            "--tensor-model-parallel-size, or give --offload-activations on"
        )
    # The room of each moment beside its fixed bytes, in layers of one micro-batch.
    room = [int((limit - moment.fixed) // _kept_layer_bytes(stages)) for moment in moments]
    kept = _most_kept(moments, layers, room)
    return CountsChoice(
        recomputed={stage: count - kept[stage] for stage, count in layers.items()},
        peak_bytes=_peak(moments, stages, kept),
    )


def fully_recomputed_peak(program: Program, stages: Mapping[int, StageBytes]) -> float:
    """Return a rank's peak bytes of saved and recomputed activations, with full recomputation."""
    moments = _worst_moments(program, stages, in_backwards=True)
    return _peak(moments, stages, dict.fromkeys(stages, 0))


def _worst_moments(
    program: Program, stages: Mapping[int, StageBytes], *, in_backwards: bool
) -> list[_Moment]:
    """Return the moments at which memory may peak, except moments that another one covers."""
    split = split_stages(program)
    forwards = Counter(stage for stage, op, _ in program if op is Op.FORWARD)
    held: Counter[int] = Counter()  # micro-batches by stage
    whole: Counter[int] = Counter()  # micro-batches by stage that hold all layers again
    early = set[tuple[int, int | None]]()
    moments: set[_Moment] = set()
    for stage, op, microbatch in program:
        if op is Op.FORWARD:
            held[stage] += 1
        elif op is Op.RECOMPUTE:
            early.add((stage, microbatch))
            whole[stage] += 1
        if op in (Op.RECOMPUTE, Op.BACKWARD, *WEIGHT_OPS):
            alone = in_backwards and op is Op.BACKWARD and (stage, microbatch) not in early
            inputs = sum(count * stages[s].recomputed for s, count in held.items())
            layers = sum(count * stages[s].layers for s, count in whole.items())
            moments.add(
                _Moment(
                    live=tuple(sorted((held - whole).items())),
                    fixed=inputs + layers * _kept_layer_bytes(stages),
                    recomputing=stage if alone else None,
                )
            )
        if op is Op.WEIGHT_PART:
            held[stage] = forwards[stage] - forwards[stage] * (microbatch or 0) // WHOLE
        elif op is (Op.WEIGHT if stage in split else Op.BACKWARD):
            held[stage] -= 1
            whole[stage] -= (stage, microbatch) in early
    ordered = sorted(moments, key=lambda moment: moment[:2])
    return [a for a in ordered if not any(a != b and b.covers(a) for b in ordered)]


def _peak(
    moments: Sequence[_Moment], stages: Mapping[int, StageBytes], kept: Mapping[int, int]
) -> float:
    return max((moment.bytes(stages, kept) for moment in moments), default=0.0)


def _kept_layer_bytes(stages: Mapping[int, StageBytes]) -> float:
    return max(size.kept for size in stages.values())


def _most_kept(
    moments: Sequence[_Moment], layers: Mapping[int, int], room: Sequence[int]
) -> dict[int, int]:
    """Return how many layers each stage keeps, with the largest sum that fits.

    This is branch and bound over the stages of a rank; stages that hold the fewest micro-batches
    come first. With a single moment the first branch is already optimal.

    Args:
        room: the room at each moment, in layers of one micro-batch.
    """
    alone = [moment.recomputing for moment in moments]
    lives = [dict(moment.live) for moment in moments]
    held = {stage: max((live.get(stage, 0) for live in lives), default=0) for stage in layers}
    stages = sorted(layers, key=lambda stage: (held[stage], stage))
    best: tuple[int, int, dict[int, int]] = (-1, 0, {})

    def visit(index: int, room: Sequence[int], kept: dict[int, int]) -> None:
        nonlocal best
        total = sum(kept.values())
        if index == len(stages):
            found = (total, min(room, default=0), kept)
            if found[:2] > best[:2]:
                best = found
            return
        if total + bound(stages[index:], room) < best[0]:
            return
        stage = stages[index]
        for count in range(layers[stage], -1, -1):
            left = tuple(
                r - count * live.get(stage, 0) - (count == 0 < layers[stage] and stage == other)
                for r, live, other in zip(room, lives, alone, strict=True)
            )
            if min(left, default=0) >= 0:
                visit(index + 1, left, kept | {stage: count})

    def bound(rest: Sequence[int], room: Sequence[int]) -> int:
        """Return an upper bound on the layers that the remaining stages can keep."""
        return min(
            (greedy(rest, r, live) for r, live in zip(room, lives, strict=True)),
            default=sum(layers[stage] for stage in rest),
        )

    def greedy(rest: Sequence[int], room: int, live: Mapping[int, int]) -> int:
        kept = 0
        for stage in sorted(rest, key=lambda stage: live.get(stage, 0)):
            held = live.get(stage, 0)
            count = min(layers[stage], room // held) if held else layers[stage]
            kept, room = kept + count, room - count * held
        return kept

    visit(0, room, {})
    return best[2]
