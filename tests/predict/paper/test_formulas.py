import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.policy.num_segments import overlapping_s
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.ring_times import group_bandwidths
from megatron.fold3d.predict.cost_model.sizes import Setup, message_bytes, tensor_parallel_bytes
from scripts.paper import perf_model
from tests.predict.paper import formulas
from tests.predict.paper.formulas import Layer4D

DATA = Path(__file__).parents[2] / "data"
AXONN, MEGATRON, MERAK, FOLD3D = (
    json.loads((DATA / f"{name}_tables.json").read_text())
    for name in ("axonn", "megatron", "merak", "fold3d")
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


# Bubbles


@pytest.mark.parametrize("vector", MEGATRON["vectors"]["bubble"])
def test_megatron_bubble_ratio(vector):
    p, v, m = vector["p"], vector["v"], vector["m"]
    assert formulas.ratio(p, v, m) == exactly(vector["expect_fraction"])
    assert formulas.interleaved_s(p, v, 1.0, 2.0) / (3 * m) == exactly(vector["expect_fraction"])
    assert formulas.gpipe_s(p, 1.0, 2.0) == formulas.one_f_one_b_s(p, 1.0, 2.0) == 3.0 * (p - 1)


@pytest.mark.parametrize("vector", MERAK["bubble"]["vectors"])
def test_merak_iterations(vector):
    s, m, forward_s = vector["s"], vector["m"], vector["T"]
    for name, key in (
        ("merak_one_f_one_b_s", "iter_1f1b"),
        ("merak_early_recompute_s", "iter_early"),
        ("merak_shifted_critical_path_s", "iter_scp"),
    ):
        bubble_s = getattr(formulas, name)(s, forward_s)
        assert formulas.merak_iteration_s(bubble_s, m, forward_s) == exactly(vector[key])


# Megatron


@pytest.mark.parametrize("vector", MEGATRON["vectors"]["params"])
def test_megatron_parameters(vector):
    found = formulas.num_parameters(vector["l"], vector["h"], vector["V"], vector["s"])
    assert found == exactly(vector["expect"])


@pytest.mark.parametrize("vector", MEGATRON["vectors"]["flops"])
def test_megatron_flops(vector):
    sizes = (vector[key] for key in ("B", "l", "h", "V", "s"))
    assert formulas.flops_per_iteration(*sizes) == exactly(vector["expect"])


def test_recomputation_costs_one_more_forward_of_the_layers():
    sizes = (8, 4, 256, 0, 128)
    with_, without = (formulas.flops_per_iteration(*sizes, recompute=r) for r in (True, False))
    assert without / with_ == exactly(72 / 96)


def layer_of(vector):
    """A model of a vector's sequence and hidden size."""
    sizes = {"seq_length": vector["s"], "hidden_size": vector["h"]}
    return ModelShape(name="layer", num_layers=1, num_attention_heads=1, **sizes)


def test_megatron_times_and_bytes():
    for vector in MEGATRON["vectors"]["eq4_days"]:
        days = formulas.training_days(*(vector[key] for key in ("T", "P", "n", "X")))
        assert days == pytest.approx(vector["expect"], abs=0.005)  # given to two decimals
    for vector in MEGATRON["vectors"]["eq1"]:
        found = formulas.pipeline_s(*(vector[key] for key in ("bprime", "b", "p", "tf", "tb")))
        assert found == exactly(vector["expect"])
    for vector in MEGATRON["vectors"]["tp_bytes_per_layer"]:
        setup = Setup(microbatch_size=vector["b"], tensor_parallel=vector["t"])
        # A forward sends half of a layer's elements, of two bytes each.
        assert tensor_parallel_bytes(layer_of(vector), setup) == exactly(vector["elems"])
    for vector in MEGATRON["vectors"]["pp_bytes"]:
        setup = Setup(microbatch_size=vector["b"], tensor_parallel=vector["t"])
        scattered = replace(setup, sequence_parallel=True)
        assert message_bytes(layer_of(vector), setup) == exactly(vector["full"])
        assert message_bytes(layer_of(vector), scattered) == exactly(vector["scattered"])
    assert formulas.best_num_checkpoints(16, 1.0, 4.0) == 8.0


# AxoNN


@pytest.mark.parametrize("vector", AXONN["vectors"], ids=lambda v: v["name"])
def test_axonn_bandwidths_and_times(vector):
    betas = group_bandwidths(
        vector["G"], vector["G_node"], vector["beta_intra"], vector["beta_inter"]
    )
    assert betas == exactly(tuple(vector["beta"]))
    layer = Layer4D(
        rows=vector["m_rows_after_data_split"],
        k=vector["k"],
        n=vector["n"],
        grid=tuple(vector["G"]),
        bandwidths=betas,
        element_bytes=vector["bytes_per_element"],
        transposed=vector["transposed"],
    )
    times = vector["times_s"]
    assert layer.all_gather_z_s() == exactly(times["ag_z"])
    assert layer.reduce_scatter_z_s() == exactly(times["rs_z"])
    assert layer.all_reduce_y_s() == exactly(times["ar_y"])
    assert layer.all_reduce_x_s() == exactly(times["ar_x"])
    assert layer.all_reduce_data_s() == exactly(times["ar_data"])
    assert layer.total_s() == exactly(times["total"])


def _traffic_of_a_layer(gx: int, gy: int) -> float:
    """Elements per token and hidden unit that X and Y send for the linears of a transformer layer.

    These are QKV and the output of attention, then both of a feed-forward layer of 4 h. The second
    one of each pair is transposed.
    """
    layers = ((1, 3, False), (1, 1, True), (1, 4, False), (4, 1, True))
    grids = [
        Layer4D(
            rows=1,
            k=k,
            n=n,
            grid=(gx, gy, 1, 1),
            bandwidths=(1.0,) * 4,
            element_bytes=1,
            transposed=transposed,
        )
        for k, n, transposed in layers
    ]
    return sum(layer.all_reduce_x_s() + layer.all_reduce_y_s() for layer in grids)


@pytest.mark.parametrize(
    ("num_gpus", "of_megatron", "best", "grid"),
    [(4, 6.0, 6.0, (4, 1)), (8, 7.0, 6.0, (4, 2)), (16, 7.5, 5.0, (8, 2))],
)
def test_weights_in_two_dimensions_save_little(num_gpus, of_megatron, best, grid):
    grids = [(num_gpus // gy, gy) for gy in (1, 2, 4, 8) if gy <= num_gpus]
    traffic = {grid: _traffic_of_a_layer(*grid) for grid in grids}
    assert traffic[num_gpus, 1] == exactly(of_megatron)
    assert min(traffic, key=traffic.__getitem__) == grid
    assert traffic[grid] == exactly(best)
    page = (Path(__file__).parents[3] / "scripts" / "bench" / "LOG.md").read_text()
    assert f"| {num_gpus} | {of_megatron:.2f} | {best:.2f} | {grid[0]} x {grid[1]} |" in page


def test_two_by_two_sends_a_third_more_than_four_in_a_row():
    assert _traffic_of_a_layer(2, 2) == exactly(4 / 3 * _traffic_of_a_layer(4, 1))
