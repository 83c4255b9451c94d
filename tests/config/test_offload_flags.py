"""What ``--offload-activations`` and ``--lazy-inter-segment`` accept, and what they know before."""

import pytest

ON = "--offload-activations on"
FULL = "--recompute-granularity full --recompute-num-layers"


def test_modules_that_the_engine_recomputes_are_named(refused):
    selective = "--recompute-granularity selective --recompute-modules core_attn mlp moe"
    fp8 = "--fp8-format hybrid --fp8-recipe tensorwise"
    refused(f"--schedule aiao {ON} {selective} {fp8}", "hybrid and --recompute-modules mlp moe: ")


@pytest.mark.parametrize(
    ("line", "states"),
    [
        (f"{FULL} 1 --recompute-method uniform", 4),
        (f"{FULL} 3 --recompute-method uniform", 2),
        (f"{FULL} 3 --recompute-method block", 3),
        (f"{FULL} 1 --recompute-method uniform --decoder-first-pipeline-num-layers 3", 3),
        ("--recompute-granularity selective", 0),
        ("--recompute-activations", 0),
        ("--no-gradient-accumulation-fusion", 4),
    ],
)
def test_offloaded_bytes_of_full_recomputation_are_known_from_the_flags(config, line, states):
    hidden_state = 32 * 2 * 64 * 4
    assert config(f"--schedule aiao {ON} {line}").saved_bytes == states * hidden_state
    half = "--bf16 --tensor-model-parallel-size 4 --sequence-parallel"
    saved = config(f"--schedule aiao {ON} {line} {half}").saved_bytes
    assert saved == states * hidden_state // 8


def test_the_fused_weight_gradient_keeps_hooks_away_from_weights(config):
    fused = f"--schedule aiao {ON} {FULL} 1 --recompute-method uniform"
    assert not config(fused).offload_everything
    unfused = f"{fused} --no-gradient-accumulation-fusion"
    assert config(unfused).offload_everything
    assert not config(unfused.replace(ON, "--offload-activations auto")).offload_everything
