"""A feature is one class: it takes part in an iteration, and nothing else has to know of it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.runtime.executor import Executor
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration
from megatron.fold3d.runtime.grad_sync.dp_sync import DPSync
from megatron.fold3d.runtime.plans import Plans
from tests.configs import CONFIG, configured
from tests.distributed import RankError, run_distributed

AFAB = configured(choice=Choice.plain("afab", 1))
OFFLOADING = configured(AFAB, offload_activations="on", offload=OffloadChoice())
Losses = list[float]


class Watch(Feature):
    """Notes, under a name, each call and action that it sees."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen
        self.evaluates = name == "outer"

    def prepare(self, iteration: Iteration) -> None:
        self.seen.append(f"{self.name} prepares")

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        return {op: self.watched(inner[op]) for op in (Op.FORWARD, Op.BACKWARD)}

    def watched(self, handler: Handler) -> Handler:
        def watch(action: Action) -> None:
            self.seen.append(f"{self.name} {action}")
            handler(action)

        return watch

    def drain(self, iteration: Iteration) -> None:
        self.seen.append(f"{self.name} drains")

    def close(self, error: BaseException | None) -> None:
        self.seen.append(f"{self.name} closes after {error!r}")


class Copies(Feature):
    """Handles two ops of its own."""

    def __init__(self) -> None:
        self.copied: list[str] = []

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        return dict.fromkeys((Op.OFFLOAD, Op.RELOAD), lambda a: self.copied.append(str(a)))


class Model(torch.nn.Module):
    """What Megatron's ``forward_step`` asks of a model chunk."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.ones(()))

    def set_input_tensor(self, _: Any) -> None:
        """Nothing comes from a rank before."""


def train(*features: Feature, m: int = 2, config: Fold3DConfig = AFAB) -> Losses:
    """Run an iteration and an evaluation of one micro-batch; return losses and the gradient."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    import fold3d_patches

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    sizes = {"num_layers": 1, "hidden_size": 4, "num_attention_heads": 1}
    model = Model(TransformerConfig(**sizes, pipeline_dtype=torch.float32))

    def forward_step(data: Iterator[float], chunk: Model) -> Any:
        output = chunk.weight * next(data)
        return output, lambda loss: (loss, loss.item())

    reports: Losses = []
    with (
        fold3d_patches.install_platform("cpu"),
        Executor(Plans(config), [DPSync(), *features]) as executor,
    ):
        for num_microbatches, forward_only in ((m, False), (1, True)):
            reports += executor(
                forward_step_func=forward_step,
                data_iterator=iter([2.0, 3.0, 4.0]),
                model=model,
                num_microbatches=num_microbatches,
                seq_length=4,
                micro_batch_size=1,
                forward_only=forward_only,
            )
    assert model.weight.grad is not None
    return [*reports, model.weight.grad.item()]


def train_watched() -> tuple[Losses, list[str]]:
    seen: list[str] = []
    return train(Watch("outer", seen), Watch("inner", seen)), seen


def train_with_copies() -> tuple[Losses, list[str]]:
    copies = Copies()
    return offloading(copies), copies.copied


offloading = partial(train, m=3, config=OFFLOADING)


class CtrlC(Feature):
    """Stands for a user who ends the run while it computes."""

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        def interrupted(action: Action) -> None:
            raise KeyboardInterrupt

        return {Op.BACKWARD: interrupted}


@pytest.mark.gloo
def test_features_stand_around_each_other_and_change_nothing():
    ((watched, seen),) = run_distributed(train_watched, 1)
    (losses,) = run_distributed(train, 1)
    assert watched == losses == [2.0, 3.0, 2.0, 2.5]  # the gradient is a mean
    assert seen == [
        *("outer prepares", "inner prepares"),
        *("outer 0F0", "inner 0F0", "outer 0F1", "inner 0F1"),
        *("outer 0B0", "inner 0B0", "outer 0B1", "inner 0B1"),
        *("inner drains", "outer drains"),
        *("outer prepares", "outer 0F0", "outer drains"),  # the evaluation
        *("inner closes after None", "outer closes after None"),
    ]


@pytest.mark.gloo
def test_a_feature_brings_ops_that_the_executor_has_never_heard_of():
    ((losses, copied),) = run_distributed(train_with_copies, 1)
    assert losses == [2.0, 3.0, 4.0, 2.0, 3.0]
    assert copied == ["0OFFLOAD0", "0OFFLOAD1", "0RELOAD0", "0OFFLOAD2", "0RELOAD1", "0RELOAD2"]


@pytest.mark.gloo
def test_an_op_that_nothing_handles_is_named():
    with pytest.raises(RankError, match="0OFFLOAD0: nothing that is on in this run") as caught:
        run_distributed(offloading, 1)
    assert "fold3d: rank 0 (pipeline rank 0) was at 0OFFLOAD0" in str(caught.value)


@pytest.mark.gloo
def test_ctrl_c_names_the_action_that_it_ended():
    with pytest.raises(RankError, match="KeyboardInterrupt") as caught:
        run_distributed(train, 1, CtrlC())
    assert "fold3d: rank 0 (pipeline rank 0) was at 0B0" in str(caught.value)


def test_an_evaluation_of_nothing_ends_at_once():
    executor = Executor(Plans(configured(choice=Choice.plain("1f1b", 1))), ())
    nothing: dict[str, Any] = dict.fromkeys(("forward_step_func", "data_iterator", "model"))
    sizes = {"num_microbatches": 0, "seq_length": 4, "micro_batch_size": 1}
    assert executor(**nothing, **sizes, forward_only=True) == []


def test_the_innermost_closes_first_and_all_hear_of_an_error_on_the_way():
    class Breaks(Feature):
        def close(self, error: BaseException | None) -> None:
            raise OSError("the link is gone")

    seen: list[str] = []
    features = [Watch("outer", seen), Breaks(), Watch("inner", seen)]
    with pytest.raises(OSError, match="the link is gone"), Executor(Plans(CONFIG), features):
        pass
    assert seen == ["inner closes after None", "outer closes after OSError('the link is gone')"]


def test_a_rank_that_leaves_is_no_error():
    seen: list[str] = []
    with pytest.raises(SystemExit), Executor(Plans(CONFIG), [Watch("only", seen)]):
        raise SystemExit(0)
    assert seen == ["only closes after None"]
