from dataclasses import asdict

import pytest

from scripts.bench import compare, predict, variants

pytestmark = pytest.mark.slow

# docs/measurements.md, 2026-11-24, by link: ms of an iteration on links that lose no messages. On
# links that are not shaped the default takes 5332 ms.
VARIANTS = ("stock-default", "stock-v8-n8", "stock-v8-n8-do", "aiao-s8-do", "aiao-s8-auto")
MEASURED = {
    "50mbit": (9462, 6580, 6159, 6184, 5471),
    "62.5mbit": (8642, 5716, 5625, 5636, 5370),
    "175mbit": (6486, 5040, 5036, 5036, 5054),
}
PACES = ("--forward-ms", "24", "--backward-ms", "48")


def report(*flags: str, rate: str = "50mbit", alone_ms: float = 5332) -> dict:
    """What `compare --json` writes, as far as it is read."""
    args = compare.parse_arguments(["--clip-grad", "0", "--rate", rate, *PACES, *flags])
    _, every = compare._read(args)
    flags_of = {variant.name: asdict(variant) for variant in every}
    return {
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "rows": [
            {"variant": flags_of[name], "spread": {"median_ms": ms}, "compute_ms": alone_ms}
            for name, ms in zip(VARIANTS, MEASURED[rate], strict=True)
        ],
    }


@pytest.mark.parametrize("rate", MEASURED)
def test_what_was_measured_on_the_testbed_is_predicted_within_2_percent(rate: str):
    found = predict.rows(report(rate=rate))
    assert tuple(row.name for row in found) == VARIANTS
    for row in found:
        assert abs(row.error) < 0.02, row


def test_where_dp_sync_is_long_variants_are_predicted_in_order():
    default, stock, distributed, ours, share = (row.predicted_ms for row in predict.rows(report()))
    assert share < ours == distributed < stock < default


def test_only_stocks_default_on_unshaped_links_is_fitted():
    slower = report()
    for row in slower["rows"][1:]:
        row["spread"], row["compute_ms"] = {"median_ms": 1}, 1
    fitted, other = (predict.rows(given) for given in (report(), slower))
    assert [row.predicted_ms for row in fitted] == [row.predicted_ms for row in other]


def test_a_faster_link_shortens_what_its_traffic_exposes():
    slow, fast = (predict.rows(report(rate=rate)) for rate in ("50mbit", "62.5mbit"))
    assert all(f.predicted_ms < s.predicted_ms for f, s in zip(fast, slow, strict=True))


def test_layers_that_were_not_paced_are_not_predicted():
    with pytest.raises(ValueError, match=r"layers were paced to 0\.0 ms forward"):
        predict.rows(report("--no-pacing"))


def test_every_known_variant_is_one_that_the_planner_knows():
    args = compare.parse_arguments(["--untied", "--clip-grad", "0"])
    bench, every = compare._read(args)
    job = predict.Job.read({key: str(value) for key, value in vars(args).items()})
    for variant in every:
        candidate = job.candidate(variant.flags)
        assert candidate.is_stock == variant.is_stock
        assert candidate.setup.distributed_optimizer == variant.is_distributed_optimizer
    assert len(every) == 1 + len(list(variants.known(bench.job))) - 1


def test_delayed_weight_grads_are_predicted():
    job = predict.Job.read(report("--rate", "400mbit")["arguments"])
    flags = ["--schedule", "aiao", "--segments", "8", "--backward-share", "auto"]
    delayed = [*flags, "--delay-weight-grads", "7,4"]
    assert job.candidate(delayed).delayed_weight_grads == (4, 7)
    assert job.iteration_ms(delayed) < job.iteration_ms(flags)
