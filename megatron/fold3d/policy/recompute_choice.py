"""How many layers each stage keeps instead of recomputing them, so that the most are kept.

A kept layer holds all its activations from its forward to its backward; a recomputed layer holds
only its input. A stage that holds few micro-batches at a time can keep its layers; one that holds
many cannot. AIAO's last segment holds few and the others hold many, so one number for a whole rank
is not enough. Each kept layer saves the same time, one recomputation per micro-batch. So a rank's
best choice is the largest total of kept layers that its memory has room for. Ranks do not share
memory and choose for themselves (Merak Sec. 5.2, extended from ranks to segments).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron.fold3d.plan.ir import WHOLE, Op, Program
from megatron.fold3d.plan.passes.weight_grads import split_stages


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """The parts of a rank's memory, in bytes.

    Attributes:
        static: parameters, gradients, the optimizer's state and everything else that stays.
        working: bytes that the running computation needs, such as for the layer that it recomputes.
        kept: one layer's activations of one micro-batch, if it is not recomputed.
        recomputed: the bytes that stay of such layers if they are recomputed: their inputs.
        limit: the limit of all of these together.
        beside: the bytes of a stage's micro-batch outside of layers, such as logits.
    """

    static: float
    working: float
    kept: float
    recomputed: float
    limit: float
    beside: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """The bytes that one micro-batch's forward of a stage keeps for its backward.

    Attributes:
        layers: the number of layers of the stage.
        recomputed: the bytes if all layers are recomputed.
        kept: the bytes that each layer adds if it is not recomputed.
    """

    layers: int
    recomputed: float
    kept: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CountsChoice:
    """How many layers each stage of a rank recomputes, and the bytes that this takes.

    Attributes:
        recomputed: layers by stage.
        peak_bytes: bytes of saved activations at the peak, those of recomputation included.
    """

    recomputed: Mapping[int, int]
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moment:
    """A backward or an early recomputation at which a rank's memory may peak.

    Attributes:
        held: by stage, the number of micro-batches held.
        whole: by stage, how many of these have recomputed all their layers already.
        recomputing: the stage whose backward recomputes layer by layer. The backward of the kept
            layers, the last ones, has ended by then, so memory grows only if it keeps no layer.
    """

    held: tuple[tuple[int, int], ...]
    whole: tuple[tuple[int, int], ...]
    recomputing: int | None


def fewest_counts(program: Program, stages: Mapping[int, StageBytes], limit: float) -> CountsChoice:
    """Return the fewest layers of each stage that have to be recomputed.

    Args:
        program: the program of the rank; its backwards are whole.
        stages: the stages of the rank, as measured.
        limit: the most bytes that saved activations may take.

    Raises:
        ValueError: they take more even if all layers are recomputed.
    """
    layers = {stage: its.layers for stage, its in stages.items()}
    moments = _worst_moments(program)
    all_kept = _peak(moments, stages, layers)
    if all_kept <= limit:
        return CountsChoice(recomputed=dict.fromkeys(layers, 0), peak_bytes=all_kept)
    if (least := _peak(moments, stages, dict.fromkeys(layers, 0))) > limit:
        raise ValueError(_too_little(least, limit))
    each = _of_a_kept_layer(stages)
    # In layers of one micro-batch: what each moment has room for beside what is always there.
    room = [int((limit - _bytes(moment, stages, {})) // each) for moment in moments]
    live = [dict(moment.held) for moment in moments]
    for moment, held in zip(moments, live, strict=True):
        for stage, count in moment.whole:
            held[stage] -= count
    recomputing = [moment.recomputing for moment in moments]
    kept = _Search(live, layers, room, recomputing).best()
    return CountsChoice(
        recomputed={stage: count - kept[stage] for stage, count in layers.items()},
        peak_bytes=_peak(moments, stages, kept),
    )


def peak_if_all_recomputed(program: Program, stages: Mapping[int, StageBytes]) -> float:
    """Return the bytes of a rank's saved activations, those of recomputation included."""
    return _peak(_worst_moments(program), stages, dict.fromkeys(stages, 0))


def _worst_moments(program: Program) -> list[_Moment]:
    """Return the moments at which memory may peak, without those that another one dominates."""
    held: Counter[int] = Counter()
    whole: Counter[int] = Counter()
    early = set[tuple[int, int | None]]()
    moments: set[_Moment] = set()
    for stage, op, microbatch in program:
        if op is Op.FORWARD:
            held[stage] += 1
        elif op is Op.RECOMPUTE:
            early.add((stage, microbatch))
            whole[stage] += 1
        if op in (Op.RECOMPUTE, Op.BACKWARD):
            alone = op is Op.BACKWARD and (stage, microbatch) not in early
            moments.add(
                _Moment(
                    held=_sorted(held), whole=_sorted(whole), recomputing=stage if alone else None
                )
            )
        if op is Op.BACKWARD:
            held[stage] -= 1
            whole[stage] -= (stage, microbatch) in early

    def covers(a: _Moment, b: _Moment) -> bool:
        of_both = a.recomputing == b.recomputing or b.recomputing is None
        return of_both and _covers(dict(a.held), dict(b.held)) and a.whole == b.whole

    ordered = sorted(moments, key=lambda moment: (moment.held, moment.whole))
    return [a for a in ordered if not any(a != b and covers(b, a) for b in ordered)]


def _sorted(counts: Counter[int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((+counts).items()))  # + leaves out stages that hold none


def _peak(
    moments: Sequence[_Moment], stages: Mapping[int, StageBytes], kept: Mapping[int, int]
) -> float:
    return max((_bytes(moment, stages, kept) for moment in moments), default=0.0)


def _bytes(moment: _Moment, stages: Mapping[int, StageBytes], kept: Mapping[int, int]) -> float:
    """Return the bytes of a moment; with an empty ``kept``, those that no choice can avoid."""
    whole = dict(moment.whole)
    layers = sum(count * stages[stage].layers for stage, count in whole.items())
    layers += sum(
        (count - whole.get(stage, 0)) * kept.get(stage, 0) for stage, count in moment.held
    )
    alone = moment.recomputing
    layers += alone is not None and kept.get(alone) == 0 < stages[alone].layers
    always = sum(count * stages[stage].recomputed for stage, count in moment.held)
    return always + layers * _of_a_kept_layer(stages)


def _of_a_kept_layer(stages: Mapping[int, StageBytes]) -> float:
    return max(its.kept for its in stages.values())


def most_live(program: Program) -> tuple[Mapping[int, int], ...]:
    """Return how many micro-batches of each stage a rank holds at once, at its worst moments.

    A moment is left out if no stage holds more at it than at another moment.
    """
    split = split_stages(program)
    now: Counter[int] = Counter()
    moments: set[tuple[tuple[int, int], ...]] = set()
    whole = Counter(stage for stage, op, _ in program if op is Op.FORWARD)
    for stage, op, number in program:
        if op is Op.FORWARD:
            now[stage] += 1
            moments.add(tuple(sorted((+now).items())))  # + leaves out stages that hold none
        elif op is Op.WEIGHT_PART:
            now[stage] = whole[stage] - whole[stage] * (number or 0) // WHOLE
        elif op is (Op.WEIGHT if stage in split else Op.BACKWARD):
            now[stage] -= 1
    live = [dict(moment) for moment in sorted(moments)]
    return tuple(a for a in live if not any(a != b and _covers(b, a) for b in live))


def kept_layers(
    live: Sequence[Mapping[int, int]], layers: Mapping[int, int], sizes: LayerBytes
) -> dict[int, int]:
    """Return how many layers each stage keeps, with the largest total that fits.

    Among several such choices, take the one with the lowest peak memory.

    Args:
        live: what the rank's program holds: see `most_live`.
        layers: the number of layers of each stage of the rank.
        sizes: the bytes of the rank's layers.

    Raises:
        ValueError: the rank does not fit even if it keeps none.
    """
    rooms = [_room(moment, layers, sizes) for moment in live]
    worst = min(rooms, default=0.0)
    if worst < 0:
        raise ValueError(_too_little(sizes.limit - worst, sizes.limit))
    extra = sizes.kept - sizes.recomputed
    if extra <= 0:
        return dict(layers)
    # In layers of one micro-batch: what each moment has room for.
    room = [int(bytes_left // extra) for bytes_left in rooms]
    return _Search(live, layers, room).best()


def _too_little(found: float, limit: float) -> str:
    return (
        f"found {found:.0f} bytes with all layers recomputed, and {limit:.0f} bytes of memory; "
        "raise --pipeline-model-parallel-size or --tensor-model-parallel-size, or give "
        "--offload-activations on"
    )


def _room(moment: Mapping[int, int], layers: Mapping[int, int], sizes: LayerBytes) -> float:
    held = sum(
        count * (layers[stage] * sizes.recomputed + sizes.beside.get(stage, 0.0))
        for stage, count in moment.items()
    )
    return sizes.limit - sizes.static - sizes.working - held


def _covers(a: Mapping[int, int], b: Mapping[int, int]) -> bool:
    return all(a.get(stage, 0) >= count for stage, count in b.items())


class _Search:
    """Branch and bound over the stages of a rank, those that hold the fewest micro-batches first.

    If there is only one moment, the first branch is already the best.

    Args:
        live: micro-batches by stage, at each moment.
        layers: the number of layers of each stage.
        room: the room at each moment, in layers of one micro-batch.
        recomputing: the stage that takes one layer more at each moment if it keeps none.
    """

    def __init__(
        self,
        live: Sequence[Mapping[int, int]],
        layers: Mapping[int, int],
        room: Sequence[int],
        recomputing: Sequence[int | None] = (),
    ) -> None:
        self._live, self._layers = live, layers
        self._recomputing = recomputing or [None] * len(live)
        held = {stage: max((m.get(stage, 0) for m in live), default=0) for stage in layers}
        self._stages = sorted(layers, key=lambda stage: (held[stage], stage))
        self._room = tuple(room)
        self._best: tuple[int, int, dict[int, int]] = (-1, 0, {})

    def best(self) -> dict[int, int]:
        self._visit(0, self._room, {})
        return self._best[2]

    def _visit(self, index: int, room: tuple[int, ...], kept: dict[int, int]) -> None:
        total = sum(kept.values())
        if index == len(self._stages):
            found = (total, min(room, default=0), kept)
            if found[:2] > self._best[:2]:
                self._best = found
            return
        if total + self._bound(index, room) < self._best[0]:
            return
        stage = self._stages[index]
        layers = self._layers[stage]
        for count in range(self._most(stage, room), -1, -1):
            left = tuple(
                r - count * moment.get(stage, 0) - (count == 0 < layers and stage == alone)
                for r, moment, alone in zip(room, self._live, self._recomputing, strict=True)
            )
            if min(left, default=0) >= 0:
                self._visit(index + 1, left, kept | {stage: count})

    def _most(self, stage: int, room: Sequence[int]) -> int:
        fits = (
            r // moment[stage]
            for r, moment in zip(room, self._live, strict=True)
            if moment.get(stage, 0)
        )
        return min(self._layers[stage], *fits, self._layers[stage])

    def _bound(self, index: int, room: Sequence[int]) -> int:
        """Return an upper bound of what the stages from ``index`` on can keep."""
        return min(
            (
                self._greedy(self._stages[index:], r, moment)
                for r, moment in zip(room, self._live, strict=True)
            ),
            default=sum(self._layers[stage] for stage in self._stages[index:]),
        )

    def _greedy(self, stages: Sequence[int], room: int, moment: Mapping[int, int]) -> int:
        kept = 0
        for stage in sorted(stages, key=lambda stage: moment.get(stage, 0)):
            held = moment.get(stage, 0)
            count = min(self._layers[stage], room // held) if held else self._layers[stage]
            kept, room = kept + count, room - count * held
        return kept
