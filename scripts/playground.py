"""Write docs/playground.html: schedules side by side, as one file for any browser."""

from collections.abc import Mapping
from pathlib import Path

from megatron.fold3d.observe.report.playground import playground
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.estimate import estimate
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup

PLAYGROUND = Path(__file__).parents[1] / "docs/playground.html"


def preset(
    model: str,
    on: str,
    *,
    tensor_parallel: int,
    num_ranks: int,
    num_segments: int,
    num_microbatches: int,
    microbatch_size: int = 1,
) -> Mapping[str, float]:
    """Return the page's settings of a model on a cluster, whose GPUs it uses all."""
    gpus = cluster(on)
    costs = estimate(
        model_shape(model),
        gpus,
        Setup(
            tensor_parallel=tensor_parallel,
            data_parallel=gpus.num_gpus // (tensor_parallel * num_ranks),
            microbatch_size=microbatch_size,
            sequence_parallel=tensor_parallel > 1,
        ),
        num_ranks=num_ranks,
        num_segments=num_segments,
    ).costs
    forward_s = sum(costs.forward_s)
    return {
        "p": num_ranks,
        "m": num_microbatches,
        "ns": num_segments,
        "transfer": float(f"{num_ranks * costs.p2p_s / forward_s:.3g}"),
        "sync": float(f"{sum(costs.grad_sync_s) / forward_s:.3g}"),
    }


def page() -> str:
    """Return the page, with a few models on clusters."""
    presets = {
        "GPT-3 18B, 128 A100, 400 Gb/s": preset(
            *("gpt3-18b", "a100x128-400g"),
            tensor_parallel=8,
            num_ranks=2,
            num_segments=4,
            num_microbatches=8,
            microbatch_size=4,
        ),
        "Llama 3 70B, 64 H100, 400 Gb/s": preset(
            *("llama3-70b", "h100x64-400g"),
            tensor_parallel=8,
            num_ranks=4,
            num_segments=4,
            num_microbatches=16,
        ),
        "GPT 1.5B, 16 RTX 3090": preset(
            *("48-1536-16", "rtx3090x16"),
            tensor_parallel=1,
            num_ranks=8,
            num_segments=3,
            num_microbatches=16,
        ),
    }
    return playground(presets=presets)


def main() -> None:
    """Write the page."""
    PLAYGROUND.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
