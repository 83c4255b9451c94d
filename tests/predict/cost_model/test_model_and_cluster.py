import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.predict.cost_model.cluster import NODES, cluster
from megatron.fold3d.predict.cost_model.model_shape import SHAPES, ModelShape, model_shape
from megatron.fold3d.predict.cost_model.training_flops import training_flops

DATA = Path(__file__).parents[2] / "data"
MEGATRON = json.loads((DATA / "megatron_tables.json").read_text())["vectors"]
TABLE_I = json.loads((DATA / "fold3d_tables.json").read_text())["table_I"]


def gpt(vector):
    """A model of a vector's sizes."""
    sizes = {"num_layers": vector["l"], "hidden_size": vector["h"]}
    return ModelShape(name="gpt", num_attention_heads=vector["h"] // 128, **sizes)


@pytest.mark.parametrize("vector", MEGATRON["params"], ids=lambda v: str(v["h"]))
def test_a_gpt_has_the_parameters_of_megatrons_formula(vector):
    final_norm = 2 * vector["h"]  # which the formula leaves out
    assert gpt(vector).num_parameters - final_norm == pytest.approx(vector["expect"], rel=1e-6)


@pytest.mark.parametrize("vector", MEGATRON["flops"], ids=lambda v: str(v["h"]))
def test_full_recomputation_computes_what_megatrons_paper_counts(vector):
    # 96 B s l h^2 (1 + s/6h + V/16lh), Narayanan et al., Sec. 5.1; its logits are not repeated.
    found = vector["B"] * training_flops(gpt(vector), "full").hardware
    assert found == pytest.approx(vector["expect"], rel=1e-6)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: model_shape("gpt5"), "unknown model 'gpt5'; choose from bert"),
        (lambda: model_shape("gpt3-18b").stage_layers(3), "40 is not divisible by 3 stages.* is 2"),
        (lambda: model_shape("2-100-3"), "hidden_size=100 is not divisible"),
        (lambda: cluster("b300x8"), "unknown cluster .*; write <node>x<gpus>"),
        (lambda: cluster("a100"), "unknown cluster .*; write <node>x<gpus>"),
        (lambda: cluster("a100xmany"), "unknown cluster .*; write <node>x<gpus>"),
        (lambda: cluster(""), "unknown cluster .*; write <node>x<gpus>"),
        (lambda: cluster("a100x12"), "12 GPUs do not fill nodes of 8; try 16"),
    ],
)
def test_models_and_clusters_that_there_are_not_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_cluster_by_name():
    found = cluster("a100x128-100g")
    assert (found.num_nodes, found.num_gpus, found.nic_bytes_per_s) == (16, 128, 12.5e9)
    assert cluster("v100x64").nic_bytes_per_s == NODES["v100"].nic_bytes_per_s
    assert cluster("a100-80gx8").gpu_memory_bytes == 80 * 2**30
    assert cluster("h100x4").gpus_per_node == 4
    assert cluster("A100-80Gx8-200G") == cluster("a100-80gx8-200g")
    assert model_shape("GPT3-18B") is model_shape("gpt3-18b")
    assert model_shape("24-2048-16-512").seq_length == 512


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


def written(folder, name, fields):
    """A cluster's file, in JSON or TOML."""
    lines = "\n".join(f"{k} = {v}" for k, v in fields.items())
    (folder / name).write_text(json.dumps(fields) if name.endswith("json") else lines)
    return str(folder / name)


def test_a_cluster_from_a_file(tmp_path):
    found, other = (cluster(written(tmp_path, name, FIELDS)) for name in ("my.json", "my.toml"))
    assert found == other
    assert (found.name, found.num_gpus) == ("my", 8)
    levels = {"switch_nodes": [2, 8], "oversubscription": [1, 3.5]}
    found = cluster(written(tmp_path, "my.toml", FIELDS | levels))
    assert (found.switch_nodes, found.oversubscription) == ((2, 8), (1, 3.5))
    assert hash(found) == hash(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nic_bytes_per_s": None}, "lacks nic_bytes_per_s; a cluster needs"),
        ({"colour": "red"}, "unknown fields colour; known are"),
        ({"nic_efficiency": 1.5}, "found nic_efficiency=1.5; an efficiency is in"),
        ({"compute_efficiency": 1.5}, "found compute_efficiency=1.5; an efficiency is in"),
        ({"layer_efficiencies": 0.5}, "it is a list of rows such as"),
        ({"layer_efficiencies": [[1, 2048, 4096, 0.5]]}, "it is a list of rows such as"),
        ({"layer_efficiencies": [[1, 2048, 4096, 8, 1.2]]}, r"an efficiency is in \(0, 1\]; mea"),
        ({"layer_efficiencies": [[0, 2048, 4096, 8, 0.2]]}, "sizes are above zero"),
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
    fields = {k: v for k, v in (FIELDS | change).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        cluster(written(tmp_path, "bad.json", fields))


def test_a_file_that_is_no_cluster_is_refused(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    for name in ("list.json", "absent.toml"):
        with pytest.raises(ValueError, match=name):
            cluster(str(tmp_path / name))
