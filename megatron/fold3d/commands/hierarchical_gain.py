"""The predicted gain of ``--hierarchical-dp-sync``, in one line."""

from collections.abc import Iterator

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.estimate import ring_and_hierarchical_s
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import gradient_bytes
from megatron.fold3d.predict.search.candidates import Candidate, can_sum_inside_nodes

_FLAG = "--hierarchical-dp-sync auto"


def hierarchical_gain(
    candidate: Candidate, shape: ModelShape, cluster: Cluster, layers: tuple[int, ...] = ()
) -> Iterator[str]:
    """Yield a line on sums inside nodes, where they are asked for or would pay.

    Args:
        candidate: the candidate that runs.
        shape: the model.
        cluster: the cluster that it runs on.
        layers: layers of each stage; if empty, those of the candidate.
    """
    setup = candidate.setup
    split = layers or candidate.layers or candidate.num_ranks * candidate.num_segments
    most_bytes = max(gradient_bytes(shape, setup, split))
    times = ring_and_hierarchical_s(cluster, setup, candidate.num_ranks, most_bytes)
    if times is None:
        if setup.hierarchical_sync:
            yield f"{_FLAG}: off here, for replicas do not share nodes and span several"
        return
    ring_s, hierarchical_s = times
    found = f"{hierarchical_s * 1e3:.1f} ms in place of {ring_s * 1e3:.1f} ms"
    pays = hierarchical_s < ring_s
    if setup.hierarchical_sync:
        judged = "it pays" if pays else "it does not pay, drop it"
        yield f"{_FLAG}: DP.sync of the largest stage takes {found}: {judged}"
    elif pays and can_sum_inside_nodes(candidate, cluster):
        yield f"{_FLAG} may pay: DP.sync of the largest stage would take {found}"
