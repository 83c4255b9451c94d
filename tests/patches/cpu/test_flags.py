"""Each flag that --device cpu stands for exists, and each one that it excludes is named."""

import pytest
from megatron.training.arguments import parse_args

from fold3d_patches.cpu import flags


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch):
    def parsed(*words: str):
        monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *flags.FLAGS, *words])
        return parse_args()

    return parsed


def test_megatron_takes_every_flag(parse) -> None:
    args = parse()
    assert (args.distributed_backend, args.transformer_impl) == ("gloo", "local")
    flags.check(args)


def test_a_users_flag_wins(parse) -> None:
    assert parse("--distributed-backend", "nccl").distributed_backend == "nccl"


@pytest.mark.parametrize(
    "words",
    [
        ("--transformer-impl", "transformer_engine"),
        ("--profile",),
        ("--record-memory-history",),
        ("--gpu-sniff-test-interval", "5"),
        ("--use-persistent-ckpt-worker",),
        ("--log-device-memory-used",),
        ("--cuda-graph-impl", "local"),
        ("--use-nccl-ub",),
        ("--distributed-backend", "nccl"),
    ],
    ids=lambda words: words[0],
)
def test_what_only_a_gpu_runs_is_refused_by_name(parse, parser, words: tuple[str, ...]) -> None:
    if words[0] not in parser._option_string_actions:
        pytest.skip(f"this Megatron-core has no {words[0]}")
    with pytest.raises(ValueError, match=f"^with --device cpu, {' '.join(words)}: ") as raised:
        flags.check(parse(*words))
    assert len(str(raised.value).splitlines()) == 1


def test_the_profiler_of_torch_runs_on_a_cpu(parse) -> None:
    flags.check(parse("--profile", "--use-pytorch-profiler"))


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--multi-latent-attention --qk-layernorm", "--q-lora-rank 8"),
        ("--num-experts 2", "--disable-bias-linear"),
        ("--context-parallel-size 2 --cp-comm-type p2p", "--cp-comm-type all_gather"),
        (
            "--num-experts 4 --disable-bias-linear --tensor-model-parallel-size 2 "
            "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2",
            "--expert-tensor-parallel-size 1",
        ),
    ],
)
def test_what_the_layers_for_cpus_lack_is_refused_with_its_fix(parse, words: str, fix: str) -> None:
    with pytest.raises(ValueError, match=fix.split()[0]):
        flags.check(parse(*words.split()))
    flags.check(parse(*words.split(), *fix.split()))
