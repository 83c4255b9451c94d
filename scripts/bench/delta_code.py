"""Time the codes of DP.sync on this machine, and check that they are exact.

    .venv/bin/python -m scripts.bench.delta_code            # a CPU, with one thread
    .venv/bin/python -m scripts.bench.delta_code --device cuda

Old values are normal, as weights are. New ones are a step of Adam away, 0.3 of the learning rate in
the mean. Gradients are normal too, and sums in fp32 of eight normal ones in bf16. Rates are bytes a
second; the best of some rounds counts.
"""

import argparse

import torch

from megatron.fold3d.runtime.grad_sync import delta_code
from megatron.fold3d.runtime.measure.timing import clock

_STD = 0.02
_ROUNDS = 7


def main() -> int:
    """Print a row for each learning rate; returns 1 if a decoded value is not the new one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--megabytes", type=int, default=32, help="of parameters (32)")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(1)
    weight, step = (torch.randn(args.megabytes << 19, device=device) for _ in range(2))
    print("learning rate  bits  encode GB/s  decode GB/s  checksum GB/s")
    is_exact = True
    for rate in (3e-5, 1e-4, 3e-4, 6e-4):
        old = (_STD * weight).bfloat16()
        new = (_STD * weight + 0.3 * rate * step).bfloat16()
        best = [float("inf")] * 3
        for _ in range(_ROUNDS):
            values = old.clone()
            passed_s = clock(device)
            message = delta_code.encode(new, old)
            times = [passed_s()]
            message = torch.cat([message, message.new_zeros(delta_code.SPARE_WORDS)])
            passed_s = clock(device)
            delta_code.decode(message, values)
            times.append(passed_s())
            passed_s = clock(device)
            delta_code.checksum(values)
            times.append(passed_s())
            best = list(map(min, best, times))
            is_exact &= torch.equal(values.view(torch.int16), new.view(torch.int16))
        rates = "  ".join(f"{new.nbytes / s / 1e9:11.2f}" for s in best)
        print(f"{rate:13.0e}  {32 * int(message[0]) / len(new):4.2f}  {rates}")
    print("gradients      bits  encode GB/s  decode GB/s")
    micro_batches = (1e-4 * torch.randn(8, len(weight) // 4, device=device)).bfloat16()
    usual = 1e-4 * weight
    kinds = {"bf16": usual.bfloat16(), "fp32": usual, "8 x bf16": micro_batches.float().sum(0)}
    for name, gradients in kinds.items():
        best = [float("inf")] * 2
        message = torch.zeros(len(weight), dtype=torch.int32, device=device)
        for _ in range(_ROUNDS):
            values = torch.zeros_like(gradients)
            passed_s = clock(device)
            delta_code.encode_gradients(gradients, message)
            times = [passed_s()]
            passed_s = clock(device)
            delta_code.decode_gradients(message, values)
            times.append(passed_s())
            best = list(map(min, best, times))
            is_exact &= torch.equal(values, gradients)
        rates = "  ".join(f"{gradients.nbytes / s / 1e9:11.2f}" for s in best)
        print(f"{name:>13}  {32 * int(message[0]) / len(gradients):4.1f}  {rates}")
    print("exact" if is_exact else "NOT EXACT")
    return not is_exact


if __name__ == "__main__":
    raise SystemExit(main())
