"""Asynchronous training as a plain loop over a weight history, in numpy and float64.

Written from the papers' formulas alone; it shares nothing with jaxpipe. The model is a residual MLP
with hand-written derivatives, a linear embedding and a linear head, possibly tied:

    x = inputs @ table;  x += tanh((x - mean) @ up + bias) @ down, layer by layer;
    loss = mean((x @ readout - targets)^2), readout being table.T where tied.

The mean is the state of a layer, 0 where layers have none. A forward reads it and then renews it:
mean = 0.9 mean + 0.1 (the mean of x over the microbatch's rows of one data shard). When a layer's
forward has seen a whole minibatch, its means are averaged over the data shards.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from typing import NamedTuple

import numpy as np

Weights = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to train with."""

    stages: int  # P
    microbatches: int  # N
    method: str = "pipemare"  # or pipedream, 2bw, synchronous
    optimizer: str = "sgd"  # or momentum, adam, adamw with a decaying rate
    rescheduling_steps: int | None = None  # T1's K
    discrepancy_decay: float | None = None  # T2's D
    # What is kept from F to the backward: tanh's output, the matmul's ("dots"), the input ("full").
    remat: str = "none"
    recompute_segment: int | None = None  # stages that recompute together from the first's input
    clip_norm: float | None = None  # of the newest finished gradients of all parts, once warm
    warm_up: int = 0  # T3: minibatches that train synchronously first
    drains: tuple[int, ...] = ()  # minibatches before which the pipeline is drained
    shards: int = 1  # of data; each has as many rows of a minibatch, one after the other

    def oldest(self, k: int) -> int:
        """The version with which the pipeline was filled that minibatch k goes through."""
        return max([self.warm_up, *(d for d in self.drains if d <= k)])


class Part:
    """Weights that are updated together: all versions, and what methods and optimizer keep."""

    def __init__(self, weights: Weights, *, tau: float, settings: Settings) -> None:
        self.history, self.tau, self.settings = [weights], tau, settings
        zeros = {k: np.zeros_like(w) for k, w in weights.items()}
        self.deltas, self.first, self.second = [zeros], dict(zeros), dict(zeros)
        self.squared_norm = 0.0

    def corrected(self, version: int, tau: float) -> Weights:
        """T2: a guess of the weights from tau updates before a version."""
        read = self.history[version]
        if self.settings.discrepancy_decay is None or self.tau == 0:
            return read
        return {k: w - tau * self.deltas[version][k] for k, w in read.items()}

    def update(self, gradients: Weights) -> None:
        k, old = len(self.history) - 1 - self.settings.warm_up, self.history[-1]
        step = {name: self._step(name, g, old[name]) for name, g in gradients.items()}
        if self.settings.rescheduling_steps is not None and k >= 0:
            p = 1 - min(k / self.settings.rescheduling_steps, 1)
            step = {name: s / max(self.tau, 1) ** p for name, s in step.items()}
        self.history.append({name: old[name] + step[name] for name in old})
        delta = self.deltas[-1]
        if self.settings.discrepancy_decay is not None and self.tau > 0 and k >= 0:
            gamma = self.settings.discrepancy_decay ** (1 / self.tau)
            delta = {name: gamma * delta[name] + (1 - gamma) * step[name] for name in old}
        self.deltas.append(delta)

    def _step(self, k: str, g: np.ndarray, w: np.ndarray) -> np.ndarray:
        """The optimizer's, of one array."""
        name, count = self.settings.optimizer, len(self.history)
        if name == "sgd":
            return -0.02 * g
        if name == "momentum":
            self.first[k] = 0.9 * self.first[k] + g
            return -0.01 * self.first[k]
        self.first[k] = 0.9 * self.first[k] + 0.1 * g
        self.second[k] = 0.95 * self.second[k] + 0.05 * g * g
        mean = self.first[k] / (1 - 0.9**count)
        square = self.second[k] / (1 - 0.95**count)
        step = mean / (np.sqrt(square) + 1e-6)
        if name == "adam":
            return -0.01 * step
        return -0.02 / count * (step + 0.1 * w)  # adamw, rate 0.02 / (step + 1)


class Trained(NamedTuple):
    """What training gives."""

    losses: list[float]  # of every minibatch
    params: dict  # at the end, like the ones given
    states: list[dict[int, np.ndarray]]  # of layers, after every minibatch


def train(
    settings: Settings,
    params: dict,
    minibatches: list[dict],
    states: dict[int, np.ndarray] | None = None,
) -> Trained:
    """Trains, tick by tick.

    Args:
      settings: what to train with.
      params: ``{"embed": {"table"}, "layers": {"up", "bias", "down"}, "head": {"readout"} or {}}``,
        layers stacked or, where hidden sizes differ, one tree each; as many as stages or more,
        spread evenly with earlier stages first.
      minibatches: inputs and targets; row r of a data shard belongs to microbatch ``r % N``.
      states: the initial mean of every layer by its number, for layers that have one.
    """
    run = _Loop(settings, params, minibatches, states or {})
    run.train()
    return Trained(run.losses, run.params(), run.states_after)


@dataclasses.dataclass
class _Flight:
    """What one data shard has of a microbatch in flight."""

    rows: dict
    x: np.ndarray  # what the last forward has put out
    read: dict[int, Weights] = dataclasses.field(default_factory=dict)  # by a stage's forward
    means: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # by a layer's
    entered: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # a stage
    values: dict[int, list] = dataclasses.field(default_factory=dict)  # inside a stage's layers


class _Loop:
    def __init__(self, settings: Settings, params: dict, minibatches: list[dict], states: dict):
        self.s, self.minibatches = settings, minibatches
        P, N = settings.stages, settings.microbatches
        self.packed, layers = isinstance(params["layers"], tuple), params["layers"]
        if not self.packed:
            layers = [{k: w[n] for k, w in layers.items()} for n in range(len(layers["up"]))]
        share, extra = divmod(len(layers), P)
        firsts = [share * i + min(i, extra) for i in range(P + 1)]
        self.held = {i: range(*firsts[i - 1 : i + 1]) for i in range(1, P + 1)}
        one = {"pipemare": 1, "pipedream": 1, "2bw": 0, "synchronous": 0}[settings.method]

        def part(weights: dict, tau: float) -> Part:
            weights = {k: np.asarray(w, np.float64) for k, w in weights.items()}
            return Part(weights, tau=tau + (settings.method == "2bw"), settings=settings)

        def tau(i: int) -> float:
            return one * (2 * (P - i) + 1) / N

        self.stages = {
            i: part({f"{k}{n}": w for n in held for k, w in layers[n].items()}, tau(i))
            for i, held in self.held.items()
        }
        self.embed, self.head = part(params["embed"], tau(1)), part(params["head"], 0.0)
        self.tied = not params["head"]
        self.parts = [self.embed, *self.stages.values(), self.head]
        self.means = [
            {n: np.asarray(mean, np.float64) for n, mean in states.items()}
            for _ in range(settings.shards)
        ]
        self.flights: dict[tuple[int, int], list[_Flight]] = {}
        self.sums: dict[tuple[int, int], Weights] = {}
        self.losses = [0.0 for _ in minibatches]
        self.states_after: list[dict[int, np.ndarray]] = [{} for _ in minibatches]

    def params(self) -> dict:
        layers = tuple(
            {k: part.history[-1][f"{k}{n}"] for k in ("up", "bias", "down")}
            for i, part in self.stages.items()
            for n in self.held[i]
        )
        if not self.packed:
            layers = {k: np.stack([w[k] for w in layers]) for k in layers[0]}
        return {"embed": self.embed.history[-1], "layers": layers, "head": self.head.history[-1]}

    # Which weights are read.

    def version(self, k: int, missing: float) -> int:
        """The version that misses so many updates of those before minibatch k's own."""
        if self.s.method == "synchronous" or k < self.s.warm_up:
            return k
        if self.s.method == "2bw":
            return max(k - 1, self.s.warm_up)
        return max(k - max(math.ceil(missing), 0), self.s.oldest(k))

    def forward_weights(self, part: Part, i: int, k: int, j: int) -> Weights:
        """What F of microbatch j of minibatch k reads on stage i."""
        missing = (2 * (self.s.stages - i) + 1 - j) / self.s.microbatches
        return part.history[self.version(k, missing)]

    def segment_end(self, i: int) -> int:
        segment = self.s.recompute_segment
        return min(math.ceil(i / segment) * segment, self.s.stages)

    def recompute_weights(self, part: Part, i: int, k: int, j: int, read: Weights) -> Weights:
        """What its second forward reads, 2(e-i) ticks before the backward; e ends the segment."""
        if self.s.method != "pipemare":
            return read
        ticks, N = 2 * (self.segment_end(i) - i), self.s.microbatches
        return part.corrected(self.version(k, (ticks - j) / N), part.tau - ticks / N)

    def backward_weights(self, part: Part, k: int, read: Weights) -> Weights:
        if self.s.method in ("pipemare", "synchronous"):
            return part.corrected(k, part.tau)
        return read

    def readout(self, k: int, j: int) -> np.ndarray:
        """The head's matrix when microbatch j leaves, P-1 ticks after it entered."""
        if self.tied:
            missing = (self.s.stages - j) / self.s.microbatches
            return self.embed.history[self.version(k, missing)]["table"].T
        return self.head.history[self.version(k, 0)]["readout"]

    # The order of time.

    def train(self) -> None:
        count = len(self.minibatches)
        warm_up = count if self.s.method == "synchronous" else self.s.warm_up
        for k in range(warm_up):
            self.synchronous(k)
        drains = [k for k in self.s.drains if warm_up < k < count]
        for first, end in itertools.pairwise([warm_up, *drains, count]):
            self.fill_and_drain(first, end)

    def synchronous(self, k: int) -> None:
        for j in range(self.s.microbatches):
            for i in self.stages:
                self.forward(i, k, j)
            cotangents = self.leave(k, j)
            for i in reversed(self.stages):
                cotangents = self.backward(i, k, j, cotangents)
        for part in self.parts:
            part.update(self.finished(part, k))

    def fill_and_drain(self, first: int, end: int) -> None:
        """Microbatches of these minibatches enter one a tick; then the last ones leave."""
        P, N = self.s.stages, self.s.microbatches
        entering = list(itertools.product(range(first, end), range(N)))
        cotangents: dict[tuple[int, int], list[np.ndarray]] = {}

        def now(tick: int, lag: int) -> list[tuple[int, int]]:
            """The microbatch that entered so many ticks ago, if there is one."""
            return entering[tick - lag : tick - lag + 1] if tick >= lag else []

        lags = [2 * P - 1, *(2 * P - i for i in self.stages), P - 1]
        for tick in range(len(entering) + 2 * P - 1):
            for i in self.stages:
                for k, j in now(tick, i - 1):
                    self.forward(i, k, j)
            for i in self.stages:
                for k, j in now(tick, 2 * P - i):
                    cotangents[k, j] = self.backward(i, k, j, cotangents[k, j])
            for k, j in now(tick, P - 1):
                cotangents[k, j] = self.leave(k, j)
            self.update(
                [
                    (part, k)
                    for part, lag in zip(self.parts, lags, strict=True)
                    for k, j in now(tick, lag)
                    if j == N - 1
                ]
            )

    def update(self, due: list[tuple[Part, int]]) -> None:
        """Updates the parts whose gradient of a minibatch is finished in this tick."""
        gradients = [self.finished(part, k) for part, k in due]
        for (part, _), gradient in zip(due, gradients, strict=True):
            part.squared_norm = float(sum(np.sum(g**2) for g in gradient.values()))
        scale = 1.0
        if self.s.clip_norm is not None:
            norm = math.sqrt(sum(part.squared_norm for part in self.parts))
            scale = self.s.clip_norm / max(norm, self.s.clip_norm)
        for (part, _), gradient in zip(due, gradients, strict=True):
            part.update({name: scale * g for name, g in gradient.items()})

    def finished(self, part: Part, k: int) -> Weights:
        return self.sums.pop((id(part), k), {})

    def add(self, part: Part, k: int, gradient: Weights) -> None:
        """Adds a data shard's gradient of a microbatch to its minibatch's mean."""
        total, count = self.sums.setdefault((id(part), k), {}), self.s.microbatches * self.s.shards
        for name, g in gradient.items():
            total[name] = total.get(name, 0) + g / count

    # Passes, each of all data shards.

    def enter(self, k: int, j: int) -> None:
        table, N = self.forward_weights(self.embed, 1, k, j)["table"], self.s.microbatches
        split = defaultdict(list)
        for name, values in self.minibatches[k].items():
            for rows in np.split(np.asarray(values, np.float64), self.s.shards):
                split[name].append(rows[j::N])
        rows = [dict(zip(split, shard, strict=True)) for shard in zip(*split.values(), strict=True)]
        self.flights[k, j] = [_Flight(own, own["inputs"] @ table) for own in rows]

    def forward(self, i: int, k: int, j: int) -> None:
        if i == 1:
            self.enter(k, j)
        read = self.forward_weights(self.stages[i], i, k, j)
        for flight, means in zip(self.flights[k, j], self.means, strict=True):
            flight.read[i], flight.entered[i] = read, flight.x
            flight.means |= {n: means.get(n, np.zeros(1)) for n in self.held[i]}
            flight.x, flight.values[i] = self.layers(i, read, flight, flight.x)
            means |= {
                n: 0.9 * means[n] + 0.1 * x.mean(0) for n, x, *_ in flight.values[i] if n in means
            }
        if j == self.s.microbatches - 1:
            for n in set(self.held[i]) & set(self.means[0]):
                mean = np.mean([means[n] for means in self.means], axis=0)
                self.states_after[k][n] = mean
                for means in self.means:
                    means[n] = mean

    def layers(self, i: int, read: Weights, flight: _Flight, x: np.ndarray):
        """A stage's output; every layer's number, its input, and the values inside."""
        values = []
        for n in self.held[i]:
            centred = x - flight.means[n]
            before = centred @ read[f"up{n}"]
            h = np.tanh(before + read[f"bias{n}"])
            values.append((n, x, centred, before, h))
            x = x + h @ read[f"down{n}"]
        return x, values

    def recompute(self, end: int, k: int, j: int) -> None:
        """Runs the segment that ends with a stage forward again, from what entered it."""
        segment = [i for i in self.stages if self.segment_end(i) == end]
        for flight in self.flights[k, j]:
            x = flight.entered[segment[0]]
            for i in segment:
                again = self.recompute_weights(self.stages[i], i, k, j, flight.read[i])
                x, flight.values[i] = self.layers(i, again, flight, x)

    def leave(self, k: int, j: int) -> list[np.ndarray]:
        """The head; returns the cotangents at its input."""
        readout, cotangents = self.readout(k, j), []
        for flight in self.flights[k, j]:
            error = flight.x @ readout - flight.rows["targets"]
            dz = 2 * error / error.size
            dreadout = flight.x.T @ dz
            if self.tied:
                self.add(self.embed, k, {"table": dreadout.T})
            else:
                self.add(self.head, k, {"readout": dreadout})
            cotangents.append(dz @ readout.T)
            self.losses[k] += float(np.mean(error**2)) / self.s.microbatches / self.s.shards
        return cotangents

    def backward(self, i: int, k: int, j: int, cotangents: list) -> list[np.ndarray]:
        """A stage's, and with the first stage's the embedding's."""
        recomputes = self.s.recompute_segment is not None and k >= self.s.warm_up
        if recomputes and self.segment_end(i) == i:
            self.recompute(i, k, j)
        part = self.stages[i]
        before_stage = []
        for flight, dx in zip(self.flights[k, j], cotangents, strict=True):
            w = self.backward_weights(part, k, flight.read[i])
            for n, _, centred, before, h in reversed(flight.values[i]):
                if self.s.remat == "full":
                    before = centred @ w[f"up{n}"]
                if self.s.remat != "none":
                    h = np.tanh(before + w[f"bias{n}"])
                ddown, dh = h.T @ dx, dx @ w[f"down{n}"].T
                dbefore = dh * (1 - h * h)
                dup, dbias = centred.T @ dbefore, dbefore.sum(0)
                self.add(part, k, {f"up{n}": dup, f"bias{n}": dbias, f"down{n}": ddown})
                dx = dx + dbefore @ w[f"up{n}"].T
            before_stage.append(dx)
            if i == 1:
                self.add(self.embed, k, {"table": flight.rows["inputs"].T @ dx})
        return before_stage
