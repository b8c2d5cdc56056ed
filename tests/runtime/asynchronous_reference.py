"""Asynchronous training as a plain loop over a weight history, in numpy and float64.

Written from the papers' formulas alone; it shares nothing with jaxpipe. The model is a residual MLP
with hand-written derivatives, a linear embedding and a linear head, possibly tied:

    x = inputs @ table;  x += tanh(x @ up + bias) @ down, layer by layer;
    loss = mean((x @ readout - targets)^2), readout being table.T where tied.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

Weights = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to train with.

    Args:
      stages: P.
      microbatches: N.
      method: pipemare, pipedream, 2bw, or synchronous.
      optimizer: sgd, momentum, adam, or adamw with a decaying rate.
      rescheduling_steps: T1's K, or None.
      discrepancy_decay: T2's D, or None.
      remat: what is kept from F to the backward: "none" tanh's output, "dots" the matmul's, "full"
        the input.
      recompute_segment: stages that recompute together from what entered the first, or None.
      clip_norm: largest global norm as far as the parts know each other's, or None.
      warm_up: T3: minibatches that train synchronously first.
      drains: minibatches before which the pipeline is drained.
    """

    stages: int
    microbatches: int
    method: str = "pipemare"
    optimizer: str = "sgd"
    rescheduling_steps: int | None = None
    discrepancy_decay: float | None = None
    remat: str = "none"
    recompute_segment: int | None = None
    clip_norm: float | None = None
    warm_up: int = 0
    drains: tuple[int, ...] = ()

    def oldest(self, k: int) -> int:
        """The version with which the pipeline was filled that minibatch k goes through."""
        return max([self.warm_up, *(d for d in self.drains if d <= k)])


class Optimizer:
    """One part's optimizer."""

    def __init__(self, name: str, weights: Weights) -> None:
        self.name, self.count = name, 0
        self.first = {k: np.zeros_like(w) for k, w in weights.items()}
        self.second = {k: np.zeros_like(w) for k, w in weights.items()}

    def update(self, gradients: Weights, weights: Weights) -> Weights:
        self.count += 1
        return {k: self._leaf(k, g, weights[k]) for k, g in gradients.items()}

    def _leaf(self, k: str, g: np.ndarray, w: np.ndarray) -> np.ndarray:
        if self.name == "sgd":
            return -0.02 * g
        if self.name == "momentum":
            self.first[k] = 0.9 * self.first[k] + g
            return -0.01 * self.first[k]
        self.first[k] = 0.9 * self.first[k] + 0.1 * g
        self.second[k] = 0.95 * self.second[k] + 0.05 * g * g
        mean = self.first[k] / (1 - 0.9**self.count)
        square = self.second[k] / (1 - 0.95**self.count)
        step = mean / (np.sqrt(square) + 1e-6)
        if self.name == "adam":
            return -0.01 * step
        return -0.02 / self.count * (step + 0.1 * w)  # adamw, rate 0.02 / (step + 1)


class Part:
    """Weights that are updated together: all their versions, and what the methods keep."""

    def __init__(self, weights: Weights, *, tau: float, settings: Settings) -> None:
        self.history = [weights]
        self.tau, self.settings = tau, settings
        self.optimizer = Optimizer(settings.optimizer, weights)
        self.deltas = [{k: np.zeros_like(w) for k, w in weights.items()}]
        self.squared_norm = 0.0

    def at(self, version: int) -> Weights:
        return self.history[version]

    def corrected(self, version: int, tau: float) -> Weights:
        """T2: a guess of the weights from tau updates before a version."""
        read = self.history[version]
        if self.settings.discrepancy_decay is None or self.tau == 0:
            return read
        return {k: w - tau * self.deltas[version][k] for k, w in read.items()}

    def update(self, gradients: Weights) -> None:
        k, old = len(self.history) - 1 - self.settings.warm_up, self.history[-1]
        step = self.optimizer.update(gradients, old)
        if self.settings.rescheduling_steps is not None and k >= 0:
            p = 1 - min(k / self.settings.rescheduling_steps, 1)
            step = {name: s / max(self.tau, 1) ** p for name, s in step.items()}
        self.history.append({name: old[name] + step[name] for name in old})
        delta = self.deltas[-1]
        if self.settings.discrepancy_decay is not None and self.tau > 0 and k >= 0:
            gamma = self.settings.discrepancy_decay ** (1 / self.tau)
            delta = {name: gamma * delta[name] + (1 - gamma) * step[name] for name in old}
        self.deltas.append(delta)


def losses(settings: Settings, params: dict, minibatches: list[dict]) -> tuple[list[float], dict]:
    """The loss of every minibatch, and the parameters at the end.

    Args:
      settings: what to train with.
      params: ``{"embed": {"table"}, "layers": {"up", "bias", "down"}, "head": {"readout"} or {}}``,
        layers stacked or, where hidden sizes differ, one tree each; as many as stages or more,
        spread evenly with earlier stages first.
      minibatches: inputs and targets; row r belongs to microbatch ``r % N``.
    """
    run = _Loop(settings, params)
    return [run.minibatch(k, batch) for k, batch in enumerate(minibatches)], run.params()


class _Loop:
    def __init__(self, settings: Settings, params: dict) -> None:
        self.s = settings
        P, N = settings.stages, settings.microbatches
        layers = params["layers"]
        self.packed = isinstance(layers, tuple)
        if self.packed:
            layers = {k: [layer[k] for layer in layers] for k in ("up", "bias", "down")}
        layers = {k: [np.asarray(w, np.float64) for w in ws] for k, ws in layers.items()}
        count = len(layers["up"])
        share, extra = divmod(count, P)
        self.held, first = [], 0
        for i in range(P):
            self.held.append(range(first, first + share + (i < extra)))
            first = self.held[-1].stop
        one = {"pipemare": 1, "pipedream": 1, "2bw": 0, "synchronous": 0}[settings.method]

        def tau(i: int) -> float:
            return one * (2 * (P - i) + 1) / N + (settings.method == "2bw")

        self.stages = [
            Part(
                {f"{k}{n}": w[n] for k, w in layers.items() for n in self.held[i - 1]},
                tau=tau(i),
                settings=settings,
            )
            for i in range(1, P + 1)
        ]
        outer = {
            name: {k: np.asarray(w, np.float64) for k, w in params[name].items()}
            for name in ("embed", "head")
        }
        self.tied = not outer["head"]
        self.embed = Part(outer["embed"], tau=tau(1), settings=settings)
        head_tau = 1.0 if settings.method == "2bw" else 0.0
        self.head = Part(outer["head"], tau=head_tau, settings=settings)

    def params(self) -> dict:
        each = [
            {k: part.history[-1][f"{k}{n}"] for k in ("up", "bias", "down")}
            for part, held in zip(self.stages, self.held, strict=True)
            for n in held
        ]
        layers = (
            {k: np.stack([w[k] for w in each]) for k in each[0]} if not self.packed else (*each,)
        )
        outer = {"embed": self.embed.history[-1], "head": self.head.history[-1]}
        return {"layers": layers, **outer}

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
        return part.at(self.version(k, missing))

    def recompute_weights(self, part: Part, i: int, k: int, j: int, read: Weights) -> Weights:
        """What its second forward reads, 2(e-i) ticks before the backward; e ends the segment."""
        if self.s.method != "pipemare":
            return read
        end = min(math.ceil(i / self.s.recompute_segment) * self.s.recompute_segment, self.s.stages)
        ticks, N = 2 * (end - i), self.s.microbatches
        return part.corrected(self.version(k, (ticks - j) / N), part.tau - ticks / N)

    def backward_weights(self, part: Part, k: int, read: Weights) -> Weights:
        if self.s.method in ("pipemare", "synchronous"):
            return part.corrected(k, part.tau)
        return read

    def readout(self, k: int, j: int) -> np.ndarray:
        """The head's matrix when microbatch j leaves, P-1 ticks after it entered."""
        if self.tied:
            missing = (self.s.stages - j) / self.s.microbatches
            return self.embed.at(self.version(k, missing))["table"].T
        return self.head.at(self.version(k, 0))["readout"]

    def minibatch(self, k: int, batch: dict) -> float:
        N, parts = self.s.microbatches, [self.embed, *self.stages, self.head]
        sums = [{name: np.zeros_like(w) for name, w in part.at(0).items()} for part in parts]
        total = 0.0
        for j in range(N):
            rows = {name: np.asarray(v, np.float64)[j::N] for name, v in batch.items()}
            value, gradients = self.microbatch(k, j, rows)
            total += value / N
            for mine, new in zip(sums, gradients, strict=True):
                for name, g in new.items():
                    mine[name] += g / N
        self.update(parts, sums)
        return total

    def update(self, parts: list[Part], sums: list[Weights]) -> None:
        """Updates in the order of time: head, last stage, ..., first stage and embedding at once.

        With N > P every part then knows this minibatch's norms of the parts before it and the last
        minibatch's of those after it.
        """
        last = len(parts) - 1
        for together in [[last], *([d] for d in range(last - 1, 1, -1)), [1, 0]]:
            scale = 1.0
            if self.s.clip_norm is not None:
                for index in together:
                    squares = (np.sum(g**2) for g in sums[index].values())
                    parts[index].squared_norm = float(sum(squares))
                norm = math.sqrt(sum(part.squared_norm for part in parts))
                scale = self.s.clip_norm / max(norm, self.s.clip_norm)
            for index in together:
                parts[index].update({name: scale * g for name, g in sums[index].items()})

    def forward(self, part: Part, held: range, read: Weights, x: np.ndarray):
        """A stage's output, and every layer's number, input and values inside."""
        values = []
        for n in held:
            before = x @ read[f"up{n}"]
            h = np.tanh(before + read[f"bias{n}"])
            values.append((n, x, before, h))
            x = x + h @ read[f"down{n}"]
        return x, values

    def microbatch(self, k: int, j: int, rows: dict) -> tuple[float, list[Weights]]:
        """Loss, and gradients of embedding, stages and head."""
        table = self.forward_weights(self.embed, 1, k, j)["table"]
        x = rows["inputs"] @ table
        kept, again, recomputed = (
            [],
            None,
            self.s.recompute_segment if k >= self.s.warm_up else None,
        )
        for i, (part, held) in enumerate(zip(self.stages, self.held, strict=True), start=1):
            read = self.forward_weights(part, i, k, j)
            if recomputed is not None:
                again = x if (i - 1) % recomputed == 0 else again
                second = self.recompute_weights(part, i, k, j, read)
                again, values = self.forward(part, held, second, again)
                x, _ = self.forward(part, held, read, x)
            else:
                x, values = self.forward(part, held, read, x)
            kept += [(part, read, *value) for value in values]
        readout = self.readout(k, j)
        error = x @ readout - rows["targets"]
        dz = 2 * error / error.size
        dreadout, dx = x.T @ dz, dz @ readout.T
        gradients: dict[int, Weights] = {id(part): {} for part in self.stages}
        for part, read, n, x_in, before, h in reversed(kept):
            w = self.backward_weights(part, k, read)
            if self.s.remat == "full":
                before = x_in @ w[f"up{n}"]
            if self.s.remat != "none":
                h = np.tanh(before + w[f"bias{n}"])
            ddown, dh = h.T @ dx, dx @ w[f"down{n}"].T
            dbefore = dh * (1 - h * h)
            gradients[id(part)] |= {
                f"up{n}": x_in.T @ dbefore,
                f"bias{n}": dbefore.sum(0),
                f"down{n}": ddown,
            }
            dx = dx + dbefore @ w[f"up{n}"].T
        dtable = rows["inputs"].T @ dx
        if self.tied:
            dtable, head = dtable + dreadout.T, {}
        else:
            head = {"readout": dreadout}
        return float(np.mean(error**2)), [
            {"table": dtable},
            *(gradients[id(part)] for part in self.stages),
            head,
        ]
