"""Defaults that depend on the devices. The planner knows them without jax."""

UNROLLED_LAYERS = 16
"""Layers per stage up to which one array per layer is worth compiling (studies/h100.md)."""


def weights(*, platform: str, alike: bool, num_layers: int, num_stages: int) -> str:
    """The layout of a stage's weights: "stacked" or "unrolled"."""
    few = num_layers <= UNROLLED_LAYERS * num_stages
    return "unrolled" if platform == "gpu" and alike and few else "stacked"


def weight_slots(platform: str) -> int:
    """Chunks of gathered weights and of gradient sums that a stage keeps at once."""
    return 1 if platform == "cpu" else 2
