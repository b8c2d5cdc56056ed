"""What is predicted of a plan, what is trained, and by what plans are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxpipe.planning import step
from jaxpipe.planning.plans import Placed, Plan
from jaxpipe.planning.sizes import PASSES, Sizes


class Found(NamedTuple):
    """A plan with what is predicted of it.

    Args:
      placed: the plan, its model and cluster.
      seconds: of a step, by part.
      bytes: of a device, by part.
      steps: optimizer steps of the training.
      exact: whether it was timed as it would run.
      compiled_bytes: of a device, by the compiler; None if it was not compiled.
    """

    placed: Placed
    seconds: Mapping[str, float]
    bytes: Mapping[str, float]
    steps: float
    exact: bool
    compiled_bytes: float | None = None

    @property
    def plan(self) -> Plan:
        return self.placed.plan

    @property
    def step_seconds(self) -> float:
        return step.total(self.seconds)

    @property
    def device_bytes(self) -> float:
        """As compiled, or else as predicted."""
        return step.total(self.bytes) if self.compiled_bytes is None else self.compiled_bytes

    @property
    def train_seconds(self) -> float:
        """Until the training ends."""
        return self.steps * self.step_seconds

    @property
    def dollars(self) -> float:
        """Of all devices until then."""
        return self.train_seconds * self.placed.cluster.dollars_per_second

    @property
    def model_flops_share(self) -> float:
        """Matmuls of F, B and W without recomputation, of the devices' data-sheet peak."""
        plan, cluster = self.plan, self.placed.cluster
        least = min(
            _model_flops(sizes, plan.rows)
            for variant, sizes in self.placed.model.variants.items()
            if variant.mesh == self.placed.variant.mesh
        )
        flops = least * plan.sharing * plan.microbatches * plan.data
        return flops / (self.step_seconds * cluster.device.flops * cluster.count)


def _model_flops(sizes: Sizes, rows: int) -> float:
    """Matmuls for a microbatch on the devices of a layer; recomputation only adds to them."""
    passes = [getattr(sizes.layers[kind], name) for kind in sizes.kind_of for name in PASSES]
    return sum(one.flops(rows) for one in (*passes, sizes.head))


Objective = Callable[[Found], float]
OBJECTIVES: Mapping[str, Objective] = {
    "time": lambda found: found.train_seconds,
    "cost": lambda found: found.dollars,
    "memory": lambda found: found.device_bytes,
}


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is trained.

    Args:
      tokens: to see, at a batch far below the critical one; None for one step.
      batches: rows of a step that may be chosen.
      critical_tokens: the critical batch; None if every token counts the same in any batch.
      objective: a name in `OBJECTIVES`.
    """

    tokens: float | None
    batches: tuple[int, ...]
    critical_tokens: float | None = None
    objective: str = "time"

    def steps(self, batch_tokens: float) -> float:
        """Optimizer steps: E_min (1 / B + 1 / B_crit) of McCandlish et al. 2018, equation 2.11.

        Example:
          >>> Goal(1e9, (8,), critical_tokens=1e6).steps(1e6)
          2000.0
        """
        if self.tokens is None:
            return 1.0
        per_token = 1 / batch_tokens
        if self.critical_tokens is not None:
            per_token += 1 / self.critical_tokens
        return self.tokens * per_token


def front(found: Sequence[Found]) -> tuple[Found, ...]:
    """The plans that no other one beats in time, memory and cost at once, by time."""
    kept: list[Found] = []
    for one in sorted(found, key=lambda one: (one.train_seconds, one.device_bytes)):
        beaten = any(
            other.device_bytes <= one.device_bytes and other.dollars <= one.dollars
            for other in kept
        )
        if not beaten:
            kept.append(one)
    return tuple(kept)
