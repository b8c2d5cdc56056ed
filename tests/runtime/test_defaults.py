"""Options that a pipeline chooses for its devices."""

import jax
import pytest
import toys

from jaxpipe.runtime import defaults
from jaxpipe.runtime.layers.split import chosen_remat


@pytest.mark.parametrize(
    ("platform", "in_excess", "num_layers", "weights", "slots", "remat"),
    [
        ("gpu", False, 64, "unrolled", 2, "dots"),
        ("gpu", False, 65, "stacked", 2, "dots"),
        ("gpu", True, 4, "stacked", 2, "dots"),
        ("tpu", False, 4, "stacked", 2, "none"),
        ("cpu", False, 4, "stacked", 1, "none"),
    ],
)
def test_gpus_unroll_few_layers_and_move_chunks_under_layers(
    platform, in_excess, num_layers, weights, slots, remat
):
    layers = {"in_excess": in_excess, "num_layers": num_layers, "num_stages": 4}
    assert defaults.weights(platform=platform, **layers) == weights
    assert defaults.weight_slots(platform) == slots
    assert chosen_remat("auto", platform) == remat


@pytest.mark.parametrize("given", [{}, {"weights": "unrolled", "weight_slots": 3}])
def test_what_is_given_stays(given):
    options = toys.pipeline("tied", "1f1b", {"stage": 2}, num_layers=4, **given).options
    on_cpus = {"weights": "stacked", "weight_slots": 1}
    assert vars(options) | on_cpus | given == vars(options)


@pytest.mark.parametrize("num_layers", [8, 6])
def test_layers_are_packed_if_their_places_take_too_much_room(num_layers, monkeypatch):
    """With two kinds in turn, chunks of four layers begin with the same, chunks of three do not,
    and these kinds share no array."""
    rooms, count = [], defaults.room
    monkeypatch.setattr(defaults, "room", lambda *args: rooms.append(count(*args)) or rooms[-1])
    sizes = [
        sum(leaf.size for leaf in jax.tree.leaves(pipe.placed_params["layers"]))
        for pipe in (
            toys.pipeline("places", "1f1b", {"stage": 2}, num_layers=num_layers, weights=weights)
            for weights in ("unrolled", "stacked", "auto")
        )
    ]
    (room,) = rooms
    assert sizes[:2] == [2 * size // 4 for size in room[:2]]
    assert room.in_excess == (num_layers == 6)


def test_layers_share_room_where_a_few_differ():
    """A dense layer in front of mixtures of experts, which devices share, in chunks of two."""
    attention = {("kernel", "attention"): defaults.Size("all", 8)}
    dense = attention | {("kernel", "mlp"): defaults.Size("all", 3)}
    mixture = attention | {("kernel", "mlp", 2): defaults.Size("shared", 40)}
    room = defaults.room([[[0, 1]], [[1, 1]], [[1]]], [dense, mixture])
    assert room == (8 + 3 + 40 + 8 + 40, 11 + 8 + 80)
    assert not room.in_excess
