"""``optimizer=replicated``: which segments every replica steps in full."""

from argparse import Namespace


def given_segments(args: Namespace) -> tuple[int, ...]:
    """Return the segments that the user names."""
    given: tuple[int, ...] | str = args.replicate_optimizer
    return () if isinstance(given, str) else given


def ties_embeddings(args: Namespace) -> bool:
    """Tell whether the first and the last stage, on two ranks, share word embeddings."""
    tied = not args.untie_embeddings_and_output_weights
    return bool(tied and args.pipeline_model_parallel_size > 1)


def halves_embeddings(args: Namespace, num_segments: int) -> bool:
    """Tell whether one of the two segments that share embeddings is named, and one is not."""
    ends = {0, num_segments - 1}
    named = ends.intersection(given_segments(args))
    return ties_embeddings(args) and num_segments > 0 and len(named) == 1 < len(ends)
