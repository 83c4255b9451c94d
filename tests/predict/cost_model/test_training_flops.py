from megatron.fold3d.predict.cost_model.model_shape import SHAPES, model_shape
from megatron.fold3d.predict.cost_model.training_flops import training_flops

SHAPE = SHAPES["gpt3-39b"]


def test_the_models_flops_are_those_without_recomputation():
    none, selective, full = (training_flops(SHAPE, how) for how in ("none", "selective", "full"))
    assert none.model == none.hardware == selective.model == full.model
    again = SHAPE.num_layers * SHAPE.score_flops
    assert selective.hardware - selective.model == again < full.hardware - full.model


def test_stages_that_recompute_some_of_their_layers_compute_these_again():
    shape = model_shape("8-64-4-32")
    some = training_flops(shape, "full", (4, 4), (1, 2))
    assert some.hardware - some.model == 3 * shape.layer_flops(0)
    assert training_flops(shape, "full", (4, 4), (4, 4)) == training_flops(shape, "full")
