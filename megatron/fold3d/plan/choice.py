"""A choice: the settings of a run's iterations that do not change the results.

A choice is an order of computation, and a state of each segment: who takes the optimizer's steps
and when, where weight gradients are computed, and when recomputation runs. Users type choices, logs
print them, `search` ranks them, ``auto`` tries them, and `plan.compile.lower` makes plans of them.

    aiao:step=next:wgrad=behind@1,3        with 4 segments, 0 and 2 have ``wgrad=backward``
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from megatron.fold3d.plan.ir import stages_of

if TYPE_CHECKING:
    from megatron.fold3d.plan.schedule_word import Word

Wgrad = Literal["backward", "behind", "last", "gaps"]
_OPEN = ("stock", "auto")  # words that do not name one of our orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The state of a segment, which holds for all of its stages.

    Attributes:
        optimizer: whether every replica steps its shard of the segment, or the whole segment.
            Without the distributed optimizer every replica steps whole segments in any case.
        step: whether the step ends the iteration, or precedes the next iteration's forwards.
        wgrad: where weight gradients are computed: in the backwards, after the segment's own
            backwards, after all backwards of the rank, or whenever the rank would wait.
        recompute: whether full recomputation is a part of the backward, or runs before it.
    """

    optimizer: Literal["sharded", "replicated"] = "sharded"
    step: Literal["end", "next"] = "end"
    wgrad: Wgrad = "backward"
    recompute: Literal["late", "early"] = "late"


_STATES = {field.name for field in fields(Segment)}  # keys that have a value for each segment


@dataclass(frozen=True, slots=True)
class Choice:
    """How the iterations of a run are computed, summed and stepped; `str` and `parse` are inverse.

    Attributes:
        order: a name of `plan.schedule_word.ORDERS`, or ``plan=`` and a file.
        group: micro-batches per group of ``interleaved``; None is as many as ranks.
        ahead: forwards that 1F1B runs ahead for each later rank; None is the schedule's default.
        held: the most micro-batches that a rank holds with ``wgrad=gaps``; None adds no limit.
        share: with ``step=next``, the part of a sum that follows the backwards; None is measured.
        slices: whether sums are cut into slices before computations; None depends on the links.
        slice_bytes: bytes of gradients that are summed at once; None depends on the links.
        pairs: whether neighbouring micro-batches are computed in pairs; None is False.
    """

    order: str
    segments: tuple[Segment, ...]
    group: int | None = None
    ahead: int | None = None
    held: int | None = None
    share: float | None = None
    slices: bool | None = None
    slice_bytes: int | None = None
    pairs: bool | None = None

    @classmethod
    def plain(cls, order: str, num_segments: int, **options: Any) -> Self:
        """Return the choice whose segments all have the defaults."""
        return cls(order, (Segment(),) * num_segments, **options)

    @classmethod
    def parse(cls, text: str, num_segments: int) -> "Choice":
        """Read the text of a word.

        Raises:
            ValueError: the text is no word, names an unknown segment, or leaves a key to ``auto``.
        """
        from megatron.fold3d.plan.schedule_word import Word

        return cls.plain("", num_segments).chosen(Word.parse(text))

    def chosen(self, word: "Word") -> Self:
        """Return this choice with the values in a word.

        Raises:
            ValueError: the word names an unknown segment, or leaves a key to ``auto``.
        """
        from megatron.fold3d.plan.schedule_word import AUTO, READ, VALUES

        choice, options = replace(self, order=word.order), dict[str, Any]()
        num_segments = len(self.segments)
        for part in word.parts:
            if part.value == AUTO:
                raise ValueError(f"{part}: only a run or a simulation can choose; give a value")
            if part.key not in _STATES:
                options[part.key.replace("-", "_")] = READ[VALUES[part.key][0]](part.value)
                continue
            some = part.segments or tuple(range(num_segments))
            if some[-1] >= num_segments:
                raise ValueError(
                    f"{part}: there is no segment {some[-1]}, a rank holds {num_segments}; "
                    f"give some of 0 to {num_segments - 1}"
                )
            choice = choice.changed(some, **{part.key: part.value})
        return replace(choice, **options)

    def __str__(self) -> str:
        """Return the choice as a word of ``--schedule``: the inverse of `chosen`."""
        from megatron.fold3d.plan.schedule_word import VALUES, Part, Word

        parts = list[Part]()
        for key, values in VALUES.items():
            if key in _STATES:
                for value in values[1:]:
                    if some := self.where(**{key: value}):
                        is_all = len(some) == len(self.segments)
                        parts.append(Part(key, value, None if is_all else some))
                continue
            given = getattr(self, key.replace("-", "_"))
            if isinstance(given, bool):
                parts.append(Part(key, values[given]))
            elif given is not None:
                parts.append(Part(key, str(given)))
        return str(Word(self.order, tuple(parts)))

    @property
    def schedule(self) -> str:
        """The schedule that runs, or with which ``auto`` begins; ``plan=FILE`` for a file."""
        is_open = self.order in _OPEN
        return stock_schedule(len(self.segments)) if is_open else self.order

    @property
    def carries(self) -> bool:
        """Whether any segment's sums and steps reach into the next iteration."""
        return any(segment.step == "next" for segment in self.segments)

    @property
    def splits(self) -> bool:
        """Whether any segment's weight gradients are computed apart from its backwards."""
        return any(segment.wgrad != "backward" for segment in self.segments)

    @property
    def fills_gaps(self) -> bool:
        """Whether any weight gradients are computed whenever a rank would wait."""
        return any(segment.wgrad == "gaps" for segment in self.segments)

    def where(self, **state: str) -> tuple[int, ...]:
        """Return the segments that have these values, as in ``where(wgrad="last")``."""
        return tuple(
            number
            for number, segment in enumerate(self.segments)
            if all(getattr(segment, name) == value for name, value in state.items())
        )

    def stages(self, num_ranks: int, **state: str) -> tuple[int, ...]:
        """Return the stages of the segments that have these values."""
        return stages_of(self.where(**state), num_ranks)

    def changed(self, segments: Iterable[int] | None = None, **state: Any) -> Self:
        """Return the choice with other values for some segments; None is all segments."""
        some = range(len(self.segments)) if segments is None else [*segments]
        return replace(
            self,
            segments=tuple(
                replace(segment, **state) if number in some else segment
                for number, segment in enumerate(self.segments)
            ),
        )

    def in_iteration(self) -> Self:
        """Return the choice with all steps at the end of their iteration."""
        return replace(self.changed(step="end"), share=None)


def file_of(order: str) -> Path | None:
    """Return the file of a ``plan=`` order; None for other orders."""
    _, _, file = order.partition("=")
    return Path(file) if file else None


def stock_schedule(num_segments: int) -> str:
    """Return the name of stock Megatron's schedule for this number of model chunks."""
    return "interleaved" if num_segments > 1 else "1f1b"


def free_values(
    *, defers: bool, delays: bool, replicates: bool, reduces_early: bool
) -> dict[str, tuple[str, ...]]:
    """Return the values of each key that ``auto`` may choose.

    Args:
        defers: whether sums and steps may reach into the next iteration.
        delays: whether weight gradients may be computed apart from their backwards.
        replicates: whether every replica may step segments in full.
        reduces_early: whether sums may start between weight gradients.
    """
    behind = ("behind",) if reduces_early else ()
    values = {
        "optimizer": (replicates, ("sharded", "replicated")),
        "step": (defers, ("end", "next")),
        "wgrad": (delays, ("backward", *behind, "last", "gaps")),
    }
    return {key: some for key, (is_free, some) in values.items() if is_free}
