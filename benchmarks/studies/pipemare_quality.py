"""What do old weights cost in quality, if every method has its own learning rate?

ResNet-20 on scikit-learn's digits, every layer a stage. The rate of each method is the best of
several on images that no later figure uses; then seeds with other initial weights and other orders
of the data. Every method also runs with the synchronous warm-up, and the ones that train for longer
have a synchronous run of as many steps beside them. Delays are simulated on one device
(`benchmarks.studies.delayed`).

    python -m benchmarks.studies.pipemare_quality
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
import tyro
from sklearn.datasets import load_digits

from benchmarks import harness
from benchmarks.studies import common, delayed
from jaxpipe.asynchronous import SteadyState
from models import resnet
from train import pipeline_section
from train.command_line import parse
from train.modes import Synchronous
from train.step import Setup

CONFIG = "configs/resnet-digits-pipemare.yaml"
"""Gives the costs of the stages; the model is its model."""
SIDES = {"train": slice(0, 1197), "tuning": slice(1197, 1497), "test": slice(1497, 1797)}
_TUNING_SEED = 1000
_EVERY = 5
_DECAY, _WEIGHT_DECAY = 0.135, 0.05
_COLORS = ("#555555", "#c0392b", "#27518f", "#1b7468", "#8e5aa8")


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to train.

    Args:
      schedule: asynchronous, or "1f1b".
      rescheduling: T1's K in steps, or None.
      correction: T2's D, or None.
      warm_up: T3: synchronous steps.
      stages: P.
      random: delays are drawn anew for every read, exponentially distributed around the pipeline's
        and cut at 4 times these, in place of the pipeline's, as in Hogwild.
    """

    schedule: str = "pipemare"
    rescheduling: int | None = None
    correction: float | None = None
    warm_up: int = 0
    stages: int = 10
    random: bool = False


@dataclasses.dataclass(frozen=True)
class Options:
    """How much to train.

    Args:
      steps: of every run.
      longer: of the runs that are given the time of the synchronous one.
      batch: images per step, in two microbatches.
      rate_warm_up: steps over which the rate rises; T3 lasts as long and T1 five times as long.
      rates: to choose from.
      seeds: of the figures.
    """

    steps: int = 150
    longer: int = 500
    batch: int = 64
    rate_warm_up: int = 20
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    seeds: int = 5


def methods(options: Options) -> dict[str, Method]:
    """The methods, each without a synchronous warm-up and with it."""
    k = 5 * options.rate_warm_up
    plain = {
        "naive": Method(),
        "T1": Method(rescheduling=k),
        "T1 + T2": Method(rescheduling=k, correction=_DECAY),
        "PipeDream": Method("pipedream"),
        "2BW": Method("2bw"),
        "naive, random delays": Method(random=True),
        "T1 + T2, random delays": Method(rescheduling=k, correction=_DECAY, random=True),
    }
    warm = {
        f"{name}, T3": dataclasses.replace(method, warm_up=options.rate_warm_up)
        for name, method in plain.items()
    }
    return {"synchronous": Method("1f1b"), **plain, **warm}


BEST = "T1 + T2, T3"


def variants(options: Options) -> dict[str, Method]:
    """What PipeMare depends on, one number changed at a time."""
    base, k, warm_up = methods(options)[BEST], 5 * options.rate_warm_up, options.rate_warm_up
    change = functools.partial(dataclasses.replace, base)
    return {
        **{f"P = {p}": change(stages=p) for p in (5, 10, 20, 40)},
        "K: no T1": change(rescheduling=None),
        **{f"K = {own}": change(rescheduling=own) for own in (k // 4, 4 * k)},
        "D: no T2": change(correction=None),
        **{f"D = {decay}": change(correction=decay) for decay in (0.01, 0.5)},
        **{f"T3: {own} steps": change(warm_up=own) for own in (0, warm_up // 2, 2 * warm_up)},
    }


class Study:
    """Runs of one model on one set of images.

    Args:
      config: of the model.
      options: how much to train.
    """

    def __init__(self, config: resnet.ResNetConfig, options: Options) -> None:
        self.config, self.options = config, options
        digits = load_digits()
        pixels = np.float32(digits.images[..., None])
        pixels = (pixels - pixels.mean()) / pixels.std()
        order = np.random.default_rng(0).permutation(len(pixels))
        every = {"images": pixels[order], "labels": np.int32(digits.target[order])}
        self.rows = {
            side: {name: values[part] for name, values in every.items()}
            for side, part in SIDES.items()
        }
        self._trainings: dict[int, delayed.Training] = {}

    @property
    def layers(self) -> int:
        return self.config.num_layers

    def training(self, oldest: int) -> delayed.Training:
        """The compiled program that keeps so many versions; most courses share one."""
        oldest = max(oldest, 2 * self.layers)
        if oldest not in self._trainings:
            adam = optax.chain(
                optax.scale_by_adam(b1=0.9, b2=0.95),
                optax.add_decayed_weights(
                    _WEIGHT_DECAY, mask=lambda tree: jax.tree.map(lambda w: w.ndim >= 2, tree)
                ),
            )
            rows = jax.tree.map(
                lambda leaf: np.zeros((2, self.options.batch // 2, *leaf.shape[1:]), leaf.dtype),
                self.rows["train"],
            )
            self._trainings[oldest] = delayed.Training(
                resnet.model(self.config, metrics=True),
                jax.eval_shape(functools.partial(resnet.init, self.config), jax.random.key(0)),
                rows,
                optimizer=adam, oldest=oldest, every=_EVERY,
            )  # fmt: skip
        return self._trainings[oldest]

    def course(self, method: Method, *, steps: int, rate: float, seed: int) -> delayed.Course:
        """What a method reads, and how it moves, in every step."""
        rates = optax.warmup_cosine_decay_schedule(
            0.0, rate, self.options.rate_warm_up, steps, 0.1 * rate
        )
        steady, delays = None, None
        if method.schedule != "1f1b":
            microbatches = 2 * method.stages if method.schedule == "2bw" else 2
            steady = SteadyState(method.stages, microbatches, method.schedule)
        if method.random and steady is not None:
            parts = [steady.stage(n * method.stages // self.layers) for n in range(self.layers)]
            tau = np.array([steady.mean_delay(part) for part in parts])
            drawn = np.random.default_rng(seed).exponential(tau, (steps, 2, self.layers))
            delays = np.int32(np.round(np.minimum(drawn, 4 * tau)))
        return delayed.course(
            steady, np.asarray(rates(np.arange(steps))),
            layers=self.layers, microbatches=2, warm_up=method.warm_up,
            rescheduling_steps=method.rescheduling, discrepancy_decay=method.correction,
            delays=delays,
        )  # fmt: skip

    def run(
        self, method: Method, *, rate: float, seed: int, side: str = "test", steps: int = 0
    ) -> delayed.Curves:
        """Trains once; the seed decides the initial weights and the order of the images."""
        steps = steps or self.options.steps
        along = self.course(method, steps=steps, rate=rate, seed=seed)
        draw, count = np.random.default_rng(seed), len(self.rows["train"]["labels"])
        epochs = -(-steps * self.options.batch // count)
        order = np.concatenate([draw.permutation(count) for _ in range(epochs)])
        numbers = order[: steps * self.options.batch].reshape(steps, 2, -1)
        params = resnet.init(self.config, jax.random.key(seed))
        training = self.training(along.oldest)
        return training.train(params, self.rows["train"], self.rows[side], numbers, along)

    def tuned(self, method: Method, *, steps: int = 0) -> float:
        """The rate with the least loss on the images for tuning."""

        def loss(rate: float) -> float:
            curves = self.run(method, rate=rate, seed=_TUNING_SEED, side="tuning", steps=steps)
            return float(np.nan_to_num(curves.heldout[-1], nan=np.inf))

        return min(self.options.rates, key=loss)

    def row(self, name: str, method: Method, *, rate: float, steps: int = 0) -> dict[str, Any]:
        """A method's figures over all seeds, and its mean curve."""
        runs = [
            self.run(method, rate=rate, seed=seed, steps=steps)
            for seed in range(self.options.seeds)
        ]
        final = [float(run.heldout[-1]) for run in runs]
        harness.note(f"{name}: rate {rate:g}, losses {[round(loss, 3) for loss in final]}")
        return {
            "method": name,
            "rate": f"{rate:g}",
            "held-out loss": statistics.mean(final),
            "of each seed": " ".join(f"{loss:.3f}" for loss in final),
            "accuracy": f"{statistics.mean(float(run.accuracy[-1]) for run in runs):.1%}",
            "rise after T3": rise(runs, method.warm_up),
            "warm-up": method.warm_up,
            "curve": np.mean([run.heldout for run in runs], axis=0),
        }


def rise(runs: Sequence[delayed.Curves], warm_up: int) -> float | str:
    """By how much the held-out loss rises above its value at the end of the warm-up, in the 20
    steps that follow: the mean over runs."""
    if not warm_up:
        return "-"
    last = -(-warm_up // _EVERY) - 1
    after = [run.heldout[last : last + 1 + 20 // _EVERY] for run in runs]
    return statistics.mean(float(np.max(losses) - losses[0]) for losses in after)


def times() -> dict[str, float]:
    """How long a step takes, in steps of a full pipeline of equal stages, by its kind."""
    config = parse(["--config", CONFIG]).config
    setup = Setup(config)
    full = pipeline_section.steady_state(config).full_utilization(setup.chunk_costs)
    return {"synchronous": 1 / (1 - Synchronous(setup).bubble(1)), "asynchronous": 1 / full}


def picture(rows: Sequence[Mapping[str, Any]], step_times: Mapping[str, float]) -> Any:
    """Held-out loss over steps and over time."""
    drawn, plots = common.figure(columns=2)
    shown = [row for row in rows if row["method"] in ("synchronous", "naive", BEST, "2BW, T3")]
    for row, color in zip(shown, _COLORS, strict=False):
        steps = _EVERY * (1 + np.arange(len(row["curve"])))
        synchronous = steps if row["method"] == "synchronous" else np.minimum(steps, row["warm-up"])
        taken = step_times["synchronous"] * synchronous
        taken = taken + step_times["asynchronous"] * (steps - synchronous)
        for axes, along in zip(plots, (steps, taken), strict=True):
            axes.plot(along, row["curve"], color=color, label=row["method"])
            axes.set_yscale("log")
    plots[0].set_xlabel("optimizer steps", fontsize=8)
    plots[1].set_xlabel("time, steps of a full pipeline", fontsize=8)
    plots[0].set_ylabel("held-out loss, nats", fontsize=8)
    plots[0].legend(frameon=False, fontsize=7)
    return drawn


def main(options: Options = Options()) -> None:
    harness.simulate(10)
    study = Study(resnet.ResNetConfig(depth=20, num_classes=10, channels=1), options)
    step_times, every = times(), methods(options)
    rates = {name: study.tuned(method) for name, method in every.items()}
    rows = [study.row(name, every[name], rate=rates[name]) for name in every]
    longer = []
    for name in ("synchronous", BEST, "2BW, T3", "PipeDream, T3"):
        rate = study.tuned(every[name], steps=options.longer)
        longer.append(study.row(name, every[name], rate=rate, steps=options.longer))
    changed = [
        study.row(name, method, rate=rates[BEST]) for name, method in variants(options).items()
    ]
    drawn = picture(rows, step_times)
    for row in [*rows, *longer, *changed]:
        del row["curve"]
    tables = {
        f"{options.steps} steps, rates tuned for each method": rows,
        f"{options.longer} steps, rates tuned again": longer,
        f"{BEST}, one number changed": changed,
        "time of a step": [step_times],
    }
    common.publish("pipemare-quality", tables, drawn)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
