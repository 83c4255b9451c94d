import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.predict.cost_model.cluster import NODES, cluster
from megatron.fold3d.predict.cost_model.model_shape import SHAPES, ModelShape, model_shape
from tests.predict.paper import formulas

DATA = Path(__file__).parents[2] / "data"
TABLE_I = json.loads((DATA / "fold3d_tables.json").read_text())["table_I"]


@pytest.mark.parametrize(
    "vector",
    json.loads((DATA / "megatron_tables.json").read_text())["vectors"]["params"],
    ids=lambda v: str(v["h"]),
)
def test_a_gpt_has_the_parameters_of_megatrons_formula(vector):
    heads = vector["h"] // 128
    shape = ModelShape(
        name="gpt", num_layers=vector["l"], hidden_size=vector["h"], num_attention_heads=heads
    )
    final_norm = 2 * vector["h"]  # which the formula leaves out
    assert shape.num_parameters - final_norm == pytest.approx(vector["expect"], rel=1e-6)


def test_a_gpt_has_the_flops_of_megatrons_formula():
    shape = model_shape("gpt3-175b")
    formula = formulas.flops_per_iteration(8, 96, 12288, 51200, 2048, recompute=False)
    assert 3 * 8 * sum(shape.stage_flops(1)) == pytest.approx(formula, rel=1e-12)


@pytest.mark.parametrize("row", TABLE_I[:7], ids=lambda r: r["model"])
def test_presets_are_the_papers_models(row):
    name = row["model"].lower().replace("gpt-3 ", "gpt3-")
    assert (SHAPES[name].num_layers, SHAPES[name].hidden_size) == (row["layers"], row["hidden"])


def test_t5_has_eleven_billion_parameters():
    assert model_shape("t5").num_parameters == pytest.approx(11.3e9, rel=0.01)


def test_stages_add_up_to_the_model():
    shape = model_shape("cpm")
    assert sum(shape.stage_flops(8)) == sum(shape.stage_flops(1))
    tied = shape.embedding_parameters
    assert sum(n.total for n in shape.stage_parameters(8)) == shape.num_parameters + tied
    assert shape.stage_flops(8)[4] > shape.stage_flops(8)[3]  # cross-attention begins


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="unknown model 'gpt5'; choose from bert"):
        model_shape("gpt5")
    with pytest.raises(ValueError, match=r"40 is not divisible by 3 stages.* fits is 2"):
        model_shape("gpt3-18b").stage_layers(3)
    with pytest.raises(ValueError, match="hidden_size=100 is not divisible"):
        model_shape("2-100-3")
    assert model_shape("24-2048-16-512").seq_length == 512


def test_a_cluster_by_name():
    found = cluster("a100x128-100g")
    assert (found.num_nodes, found.num_gpus, found.nic_bytes_per_s) == (16, 128, 12.5e9)
    assert cluster("v100x64").nic_bytes_per_s == NODES["v100"].nic_bytes_per_s
    assert cluster("a100-80gx8").gpu_memory_bytes == 80 * 2**30
    assert cluster("h100x4").gpus_per_node == 4
    assert cluster("A100-80Gx8-200G") == cluster("a100-80gx8-200g")
    assert model_shape("GPT3-18B") is model_shape("gpt3-18b")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("gpu_memory_bytes", 80, "=80; it is in bytes: give 80e9 if you mean gigabytes"),
        ("host_memory_bytes", 2000.0, "=2000; it is in bytes: give 2000e9"),
        ("nic_bytes_per_s", 12.5, "=12.5; it is in bytes: give 12.5e9"),
        ("gpu_flops_per_s", 312, "=312; it is in FLOP: give 312e9 if you mean gigaFLOP"),
    ],
)
def test_giga_in_place_of_units_are_refused(field: str, value: float, message: str):
    with pytest.raises(ValueError, match=re.escape(f"found {field}{message}")):
        replace(cluster("a100x8"), **{field: value})


def test_a_name_may_say_how_many_nics_a_node_has():
    found = cluster("a100x16-4x200g")
    assert (found.nics, found.nic_bytes_per_s) == (4, 100e9)
    assert cluster("a100x16-800g") == replace(found, nics=1, name="a100x16-800g")


def test_slow_links_lose_headers_alone():
    assert cluster("a100x16-10g").nic_efficiency == pytest.approx(0.94, abs=0.002)
    assert cluster("a100x16-25g").nic_efficiency == NODES["a100"].nic_efficiency
    assert cluster("testbedx2-0.1g").nic_efficiency == NODES["testbed"].nic_efficiency


@pytest.mark.parametrize("name", ["b300x8", "a100", "a100xmany", ""])
def test_an_unknown_cluster_is_refused_with_those_there_are(name):
    with pytest.raises(ValueError, match=r"unknown cluster .*; write <node>x<gpus>"):
        cluster(name)


def test_gpus_must_fill_their_nodes():
    with pytest.raises(ValueError, match="12 GPUs do not fill nodes of 8; try 16"):
        cluster("a100x12")


FIELDS = {
    "num_nodes": 2,
    "gpus_per_node": 4,
    "gpu_flops_per_s": 1e14,
    "gpu_memory_bytes": 4e10,
    "nic_bytes_per_s": 1e10,
    "intra_bytes_per_s": 1e11,
    "host_copy_bytes_per_s": 1e10,
    "host_memory_bytes": 1e12,
}


def test_a_cluster_from_a_file(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(FIELDS))
    (tmp_path / "mine.toml").write_text("\n".join(f"{k} = {v}" for k, v in FIELDS.items()))
    from_json, from_toml = (cluster(str(tmp_path / f"mine.{end}")) for end in ("json", "toml"))
    assert from_json == from_toml
    assert (from_json.name, from_json.num_gpus) == ("mine", 8)


def test_a_cluster_file_has_levels_of_switches(tmp_path):
    levels = {"switch_nodes": [2, 8], "oversubscription": [1, 3.5]}
    (tmp_path / "mine.toml").write_text(
        "\n".join(f"{k} = {v}" for k, v in {**FIELDS, **levels}.items())
    )
    found = cluster(str(tmp_path / "mine.toml"))
    assert (found.switch_nodes, found.oversubscription) == ((2, 8), (1, 3.5))
    assert hash(found) == hash(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nic_bytes_per_s": None}, "lacks nic_bytes_per_s; a cluster needs"),
        ({"colour": "red"}, "unknown fields colour; known are"),
        ({"nic_efficiency": 1.5}, "found nic_efficiency=1.5; an efficiency is in"),
        ({"num_nodes": 0}, "found num_nodes=0; it is above zero"),
        ({"switch_nodes": 4}, "found switch_nodes=4; it is a list of whole numbers from 1 on"),
        ({"switch_nodes": [4]}, "found 1 switch_nodes and 0 oversubscription; each level"),
        (
            {"switch_nodes": [4, 6], "oversubscription": [1, 2]},
            r"found switch_nodes=\[4, 6\]; each is a multiple of the one before",
        ),
        ({"oversubscription": [0.5]}, r"found oversubscription=\[0.5\]; it is a list of numbers"),
    ],
)
def test_a_bad_cluster_file_is_refused(tmp_path, change, message):
    found = {k: v for k, v in {**FIELDS, **change}.items() if v is not None}
    (tmp_path / "bad.json").write_text(json.dumps(found))
    with pytest.raises(ValueError, match=message):
        cluster(str(tmp_path / "bad.json"))


def test_a_file_that_is_no_cluster_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    for name in ("list.json", "absent.toml"):
        with pytest.raises(ValueError, match=name):
            cluster(str(tmp_path / name))
