"""Options that a pipeline chooses for its devices."""

import pytest
import toys

from jaxpipe.runtime import defaults
from jaxpipe.runtime.layers.split import chosen_remat


@pytest.mark.parametrize(
    ("platform", "alike", "num_layers", "weights", "slots", "remat"),
    [
        ("gpu", True, 64, "unrolled", 2, "dots"),
        ("gpu", True, 65, "stacked", 2, "dots"),
        ("gpu", False, 4, "stacked", 2, "dots"),
        ("tpu", True, 4, "stacked", 2, "none"),
        ("cpu", True, 4, "stacked", 1, "none"),
    ],
)
def test_gpus_unroll_few_layers_and_move_chunks_under_layers(
    platform, alike, num_layers, weights, slots, remat
):
    layers = {"alike": alike, "num_layers": num_layers, "num_stages": 4}
    assert defaults.weights(platform=platform, **layers) == weights
    assert defaults.weight_slots(platform) == slots
    assert chosen_remat("auto", platform) == remat


@pytest.mark.parametrize("given", [{}, {"weights": "unrolled", "weight_slots": 3}])
def test_what_is_given_stays(given):
    options = toys.pipeline("tied", "1f1b", {"stage": 2}, num_layers=4, **given).options
    on_cpus = {"weights": "stacked", "weight_slots": 1}
    assert vars(options) | on_cpus | given == vars(options)


def test_layers_that_are_alike_place_by_place_are_alike(monkeypatch):
    """With two kinds in turn, chunks of four layers begin with the same, chunks of three do not."""
    seen = []

    def weights(*, alike, **_):
        seen.append(alike)
        return "stacked"

    monkeypatch.setattr(defaults, "weights", weights)
    for num_layers in (8, 6):
        toys.pipeline("places", num_layers=num_layers, weights="auto")
    assert seen == [True, False]
