from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.config.all_flags import megatron_defaults
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.predict.cost_model.hardware_profile import HardwareProfile
from megatron.fold3d.predict.search.segments import iterations
from megatron.fold3d.training import auto_segments
from megatron.fold3d.training.auto_segments import cache_file, choose, flags_of, keep, read_kept

Parse = Callable[[str], Namespace]

MEASURED = HardwareProfile(
    layer_forward_s=0.006,
    layer_backward_s=0.012,
    head_forward_s=0.001,
    head_backward_s=0.002,
    embedding_forward_s=0.0005,
    embedding_backward_s=0.0,
    message_s=0.001,
    message_latency_s=0.0001,
    grad_sync_s_per_byte=4e-8,
    grad_sync_latency_s=0.001,
    layer_gradient_bytes=3e6,
    head_gradient_bytes=1e6,
)


@pytest.fixture
def parse(parser: ArgumentParser) -> Parse:
    def parse(line: str) -> Namespace:
        model = (
            "--num-layers 16 --hidden-size 256 --num-attention-heads 4 --seq-length 32 "
            "--micro-batch-size 1 --pipeline-model-parallel-size 2 --segments auto"
        )
        return parser.parse_args(f"{model} {line}".split())

    return parse


def only_problem(args: Namespace) -> str:
    with pytest.raises(ValueError, match="--segments auto") as raised:
        read_config(args)
    (problem,) = str(raised.value).splitlines()
    return problem


def test_measured_costs_add_the_embedding_and_the_head_to_the_end_stages():
    costs = MEASURED.costs((4, 4, 4, 4))
    assert costs.forward_s == pytest.approx((0.0245, 0.024, 0.024, 0.025))
    assert costs.backward_s == pytest.approx((0.048, 0.048, 0.048, 0.05))
    assert costs.grad_sync_s == pytest.approx((0.521, 0.481, 0.481, 0.521))
    assert (costs.p2p_s, costs.p2p_latency_s) == (0.001, 0.0001)
    assert HardwareProfile.from_json(MEASURED.to_json()) == MEASURED
    with pytest.raises(ValueError, match="layer_forward_s=-1; it is a number from 0 on"):
        replace(MEASURED, layer_forward_s=-1)


def test_slow_gradients_ask_for_segments_and_slow_messages_against_them(parse: Parse):
    args = parse("--schedule aiao:step=next")
    choice = choose(args, MEASURED, num_microbatches=8)
    assert choice.num_segments == 8
    rule = "the paper's rule says 8: 0.953 s of PP.sync and DP.sync fit behind 1.15 s"
    assert rule in choice.reason
    slow = replace(MEASURED, message_s=0.1, grad_sync_s_per_byte=0.0)
    assert choose(args, slow, num_microbatches=8).num_segments == 1


ALONE = replace(MEASURED, grad_sync_s_per_byte=0.0, grad_sync_latency_s=0.0)
HEAVY_HEAD = replace(ALONE, head_forward_s=0.012, head_backward_s=0.024)  # two layers
PLENTY = lambda *_: True  # noqa: E731


@pytest.mark.slow
def test_a_heavy_head_moves_layers_off_the_last_rank(parse: Parse):
    args = parse("--schedule aiao:step=next")
    choice = choose(args, HEAVY_HEAD, 4, PLENTY)
    *_, last = choice.layers
    of_rank = [sum(choice.layers[rank::2]) for rank in range(2)]
    assert of_rank == [9, 7]
    assert last < max(choice.layers)
    stages = 2 * choice.num_segments
    flags = flags_of(choice)
    assert flags[0::2] == ["--segments", "--pipeline-model-parallel-layout"]
    assert flags[3].count("|") == stages - 1
    assert "layers " in choice.reason
    typed = parse(f"--schedule aiao {' '.join(flags)}")
    assert read_config(typed).num_segments == choice.num_segments


@pytest.mark.parametrize(
    ("flags", "has_room"),
    [
        ("", None),
        ("", lambda _timeline, layers, even: layers == even),
        ("--decoder-last-pipeline-num-layers 6 --decoder-first-pipeline-num-layers 10", PLENTY),
        ("--num-experts 2", PLENTY),
    ],
)
def test_layers_stay_even_where_others_are_not_known_to_run(parse: Parse, flags: str, has_room):
    choice = choose(parse(f"--schedule aiao {flags}"), HEAVY_HEAD, 4, has_room)
    assert choice.layers == ()


def test_a_gpu_has_room_for_what_fits_and_for_what_even_layers_take(
    parse: Parse, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    args = parse("--schedule aiao --vocab-size 1000 --max-position-embeddings 32")
    aiao = Choice.plain("aiao", 1, share=1.0).changed(step="next")
    job = Job(choice=aiao, num_ranks=2, num_microbatches=4)
    even, uneven = (4, 4, 4, 4), (1, 1, 13, 1)
    timeline = iterations(job, 2, ALONE.costs(even))
    for gpu_bytes, has_room in ((1, False), (2**40, True)):
        monkeypatch.setattr(auto_segments, "device_bytes", lambda _, n=gpu_bytes: n)
        room = auto_segments.room_for_layers(args)
        assert room is not None
        assert room(timeline, even, even)
        assert room(timeline, uneven, even) is has_room
    args.vocab_size = None
    assert auto_segments.room_for_layers(args) is None


@pytest.mark.slow
def test_layers_stay_even_for_less_than_one_percent(parse: Parse):
    light = replace(ALONE, head_forward_s=0.0, head_backward_s=1e-5, embedding_forward_s=0.0)
    assert choose(parse("--schedule aiao"), light, 4, PLENTY).layers == ()


def test_layers_that_do_not_divide_are_split_by_a_layout(parse: Parse):
    args = parse("--schedule aiao --num-layers 17")
    assert read_config(args).num_segments == 1
    choice = choose(args, ALONE, 4, PLENTY)
    assert sum(choice.layers) == 17
    assert "the paper's rule" not in choice.reason


def test_auto_segments_sets_no_virtual_stages_before_it_has_chosen(parse: Parse):
    args = parse("--schedule aiao")
    assert read_config(args).num_segments == 1
    assert megatron_defaults(args) == {}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("", "--segments auto with --schedule stock: it is chosen for schedules of several"),
        ("--schedule 1f1b", "--segments auto with --schedule 1f1b"),
        (
            "--schedule aiao --num-virtual-stages-per-pipeline-rank 2",
            "--segments auto with --num-virtual-stages-per-pipeline-rank 2: that is a number",
        ),
        ("--schedule aiao --check", "--segments auto with --check: it measures the hardware"),
    ],
)
def test_flags_that_auto_segments_excludes_are_refused(parse: Parse, flags: str, problem: str):
    assert only_problem(parse(flags)).startswith(problem)


def test_layers_that_cannot_be_split_are_refused(parse: Parse):
    with pytest.raises(ValueError, match="17 layers on 2 ranks: each holds as many"):
        read_config(parse("--schedule aiao --num-layers 17 --num-experts 2"))
    args = parse("--schedule aiao --num-layers 17")
    with pytest.raises(ValueError, match="auto: 17 layers on 2 ranks"):
        choose(args, MEASURED, num_microbatches=8)
    args.num_layers = None
    assert only_problem(args).startswith("--segments auto without --num-layers")


def test_measurements_are_kept_for_what_they_are_of(
    parse: Parse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = "--schedule aiao --device cpu"
    kept = cache_file(parse(flags))
    assert read_kept(kept) is None
    keep(kept, MEASURED)
    assert read_kept(cache_file(parse(f"{flags} --lr 0.1"))) == MEASURED
    assert cache_file(parse(f"{flags} --hidden-size 512")) != kept
    assert cache_file(parse(f"{flags} --use-tp-pp-dp-mapping")) != kept
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert cache_file(parse(flags)) != kept
    kept.write_text("{}")
    assert read_kept(kept) is None


def test_segments_for_a_schedule_that_is_chosen_later_are_those_of_aiao(parse: Parse):
    later, aiao = (choose(parse(f"--schedule {name}"), MEASURED, 8) for name in ("auto", "aiao"))
    assert later == aiao
