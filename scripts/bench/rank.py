"""One rank of a bench: ``pretrain_gpt.py`` under the bench's own patches.

    python -m scripts.bench.rank --forward-ms 6 --backward-ms 12 --nccl-order -- FLAGS

Stock Megatron and every schedule of ours run through here, so all get the same treatment; what
follows ``--`` is for ``pretrain_gpt.py`` and is not looked at.
"""

import argparse
import sys
from collections.abc import Sequence

import pretrain_gpt
from fold3d_patches import registry
from scripts.bench import fused_adam, half_layer_pacing, layer_pacing, nccl_order, same_weights


def main(argv: Sequence[str]) -> int:
    """Patch, train, and restore; returns the exit code."""
    split = argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forward-ms", type=float, help="pace the forward of each layer")
    parser.add_argument("--backward-ms", type=float, help="pace the backward of each layer")
    parser.add_argument(
        "--half-ms", type=float, help="sleep in the forward of each half of a layer"
    )
    parser.add_argument("--experts", action="store_true", help="a layer's second half is experts")
    parser.add_argument("--nccl-order", action="store_true", help="collectives as NCCL runs them")
    args = parser.parse_args(argv[:split])

    patches = [same_weights.patch(), fused_adam.patch()]
    if args.forward_ms or args.backward_ms:
        pace_s = [(ms or 0.0) / 1e3 for ms in (args.forward_ms, args.backward_ms)]
        patches += layer_pacing.patches(*pace_s)
    if args.half_ms:
        forward_s = args.half_ms / 1e3
        patches += half_layer_pacing.patches(forward_s, 2 * forward_s, experts=args.experts)
    if args.nccl_order:
        patches += nccl_order.patches()
    with registry.apply(patches):
        return pretrain_gpt.main(list(argv[split + 1 :]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
