import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.policy.num_segments import overlapping_s
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.ring_times import (
    all_gather_s,
    all_reduce_s,
    group_bandwidths,
    reduce_scatter_s,
)
from megatron.fold3d.predict.cost_model.sizes import Setup, message_bytes, tensor_parallel_bytes
from scripts.paper import perf_model

DATA = Path(__file__).parents[2] / "data"
AXONN, MEGATRON, FOLD3D = (
    json.loads((DATA / f"{name}_tables.json").read_text())
    for name in ("axonn", "megatron", "fold3d")
)
ROWS_3D = [r for r in FOLD3D["table_II"] + FOLD3D["table_III"] if r["pp"]]


def exactly(value):
    return pytest.approx(value, rel=1e-6)


# The paper's equations


@pytest.mark.parametrize("row", ROWS_3D, ids=lambda r: f"{r['cluster']} {r['model']} {r['system']}")
def test_bubble_of_the_published_rows(row):
    found = perf_model.bubble_s(
        row["fwd_ms"] + row["bwd_ms"],
        row["pp"],
        row["derived"]["v_used_in_bubble_eq"],
        row["derived"]["microbatches_per_pipeline"],
    )
    assert found == pytest.approx(row["derived"]["bubble_eq_ms"], abs=0.05)  # printed to 0.1 ms


def test_host_memory_of_aiao_is_equation_7():
    # GPT-3 39B on the A100 cluster: 16 micro-batches of 4 x 1024 tokens, 12 layers per rank in 4
    # segments, one saved input of 8192 values of 2 bytes per layer; the paper has 12.9 GB.
    saved = 3 * 4 * 1024 * 8192 * 2
    assert perf_model.aiao_activation_bytes(4, 16, saved) == pytest.approx(12.9e9, rel=0.005)


def test_interleaved_memory_is_equation_6():
    assert perf_model.interleaved_activation_bytes(4, 2, 10.0) == 110.0


def test_overlap_splits_communication_and_loses_none_of_it():
    parts = (4.0, 8.0, 2, 4)
    hidden = overlapping_s(*parts)
    exposed = perf_model.exposed_s(*parts[:2], 1.0, *parts[2:])
    assert (hidden, exposed) == (3.0 + 4.0, 1.0 + 4.0 + 1.0)
    assert perf_model.overlapped_s(10.0, hidden, exposed, 2.0) == 18.0
    assert perf_model.serialized_s(10.0, 4.0 + 8.0 + 1.0, 2.0) == 25.0


def test_grad_sync_of_the_published_row_needs_the_bandwidth_the_paper_saw():
    # GPT-3 18B, dp=8, pp=2: 16-bit gradients of half the model per host, 2020 ms published.
    assert perf_model.grad_sync_s(18.12e9, 8, 15.7e9) == pytest.approx(2.020, rel=0.01)
    assert perf_model.p2p_s(3, 10.0, 5.0) == 6.0


def layer_of(vector):
    """A model of a vector's sequence and hidden size."""
    sizes = {"seq_length": vector["s"], "hidden_size": vector["h"]}
    return ModelShape(name="layer", num_layers=1, num_attention_heads=1, **sizes)


def test_megatron_bytes():
    for vector in MEGATRON["vectors"]["tp_bytes_per_layer"]:
        setup = Setup(microbatch_size=vector["b"], tensor_parallel=vector["t"])
        # A forward sends half of a layer's elements, of two bytes each.
        assert tensor_parallel_bytes(layer_of(vector), setup) == exactly(vector["elems"])
    for vector in MEGATRON["vectors"]["pp_bytes"]:
        setup = Setup(microbatch_size=vector["b"], tensor_parallel=vector["t"])
        scattered = replace(setup, sequence_parallel=True)
        assert message_bytes(layer_of(vector), setup) == exactly(vector["full"])
        assert message_bytes(layer_of(vector), scattered) == exactly(vector["scattered"])


# AxoNN


@pytest.mark.parametrize("vector", AXONN["vectors"], ids=lambda v: v["name"])
def test_axonn_bandwidths_and_times(vector):
    betas = group_bandwidths(
        vector["G"], vector["G_node"], vector["beta_intra"], vector["beta_inter"]
    )
    assert betas == exactly(tuple(vector["beta"]))
    (gx, gy, gz, data), (bx, by, bz, b_data) = vector["G"], betas
    if vector["transposed"]:  # the roles, and the bandwidths, of x and y are swapped
        gx, gy, bx, by = gy, gx, by, bx
    size, rows, k, n = (
        vector[name] for name in ("bytes_per_element", "m_rows_after_data_split", "k", "n")
    )
    weight = size * k * n / (gx * gy)  # of a fully connected layer, m rows times k by n
    times = {  # equations 4 to 8; of them the last is DP.sync
        "ag_z": all_gather_s(gz, weight / gz, bz),
        "rs_z": reduce_scatter_s(gz, weight, bz),
        "ar_y": all_reduce_s(gy, size * rows * n / (gz * gx), by),
        "ar_x": all_reduce_s(gx, size * rows * k / (gz * gy), bx),
        "ar_data": all_reduce_s(data, weight / gz, b_data),
    }
    times["total"] = sum(times.values())
    assert times == exactly(vector["times_s"])
