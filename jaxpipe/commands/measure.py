"""``jaxpipe measure``: the rates that devices attain, and the time of a model's layers on them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from jaxpipe import gpu_flags
from jaxpipe.commands.plan import progress_bar
from jaxpipe.planning import configurations
from jaxpipe.planning.devices import MEASURED_PASSES, Calibration
from jaxpipe.schedule.problems import Problem, below_one, refuse

_SIMULATED = 2
_MOST_SIMULATED = 8


def measure(
    *,
    config: Path,
    out: Path,
    devices: int | None = None,
    rows: tuple[int, ...] = (1, 4),
    remat: tuple[Literal["none", "dots", "full"], ...] = ("none", "full"),
) -> None:
    """Time a model's layers and optimizer, messages and collectives on the devices that jax has.

    The file that is written takes the place of a device's name: `jaxpipe plan --device FILE`,
    `jaxpipe compare --layer-model SIZES --device FILE`. All devices work at once, as in a step. A
    layer must fit a device, the model need not.

    Args:
      config: a configuration of the trainer, whose model and optimizer are meant.
      out: the .json file to write.
      devices: number of devices, at least 2; by default all GPUs. Without GPUs, this many CPU
        devices are simulated, up to 8 and 2 by default; they share the cores of the machine.
      rows: rows of a microbatch on one device; several numbers take longer and are averaged over.
      remat: policies of rematerialization that are timed and averaged over.
    """
    refuse(_problems(out, devices, rows))
    gpu_flags.apply()
    with progress_bar() as bar:
        measuring = bar.add_task("measuring", total=1.0)
        configured = configurations.read(config)
        calibration = configured.measured(
            rows=rows,
            remats=remat,
            devices=_available(devices),
            progress=lambda share: bar.update(measuring, completed=share),
        )
    out.write_text(calibration.to_json(), encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 120, markup=False)
    _report(console, calibration)
    console.print(f"{out} is written: jaxpipe plan --config {config} --devices N --device {out}")


def _problems(out: Path, devices: int | None, rows: Sequence[int]) -> list[Problem]:
    problems = []
    if out.suffix != ".json":
        rule = "must end in .json, by which `plan` and `compare` know it"
        problems.append(Problem("out", str(out), rule, (str(out.with_suffix(".json")),)))
    if devices is not None and devices < 2:
        rule = "must be at least 2: a message needs two"
        problems.append(Problem("devices", devices, rule, (2,)))
    return problems + [problem for count in rows for problem in below_one(rows=count)]


def _available(devices: int | None) -> int:
    """Number of devices to use; simulates them where jax expects no accelerator."""
    import jax

    from jaxpipe.testing import simulate_devices

    if not gpu_flags.expects_gpu():
        number = _SIMULATED if devices is None else devices
        if number > _MOST_SIMULATED:
            rule = "is too many to simulate: they share the cores of this machine"
            refuse([Problem("devices", number, rule, (_MOST_SIMULATED,))])
        simulate_devices(number)
        return number
    there = jax.local_device_count()
    number = there if devices is None else devices
    if not 2 <= number <= there:
        rule = f"must be from 2 to {there}, the devices of this machine"
        note = "" if there > 1 else "JAX_PLATFORMS=cpu simulates devices."
        refuse([Problem("devices", number, rule, (there,) if there > 1 else (), note=note)])
    return number


def _report(console: Console, calibration: Calibration) -> None:
    device, peaks = calibration.device, calibration.peaks
    console.print(
        f"{device.source}: {peaks.flops / 1e12:.3g} TFLOP/s of matmuls "
        f"({device.efficiency.flops:.0%} of the peak), {peaks.bandwidth / 1e9:.4g} GB/s of memory "
        f"({device.efficiency.memory:.0%}), {peaks.message / 1e9:.3g} GB/s of a message and "
        f"{peaks.collective / 1e9:.3g} GB/s of gathers and reductions "
        f"({device.efficiency.link:.0%}), and {peaks.latency * 1e6:.3g} us of each"
    )
    table = Table("pass", "remat", "rows", "layers", "ms", "ms of its kernels", "times")
    for timed in calibration.timed:
        times = f"{timed.seconds / timed.expected:.2f}"
        shown = [timed.name, timed.remat, str(timed.rows or "-"), str(timed.count)]
        table.add_row(*shown, f"{timed.seconds * 1e3:.4g}", f"{timed.expected * 1e3:.4g}", times)
    console.print(table)
    factors = ", ".join(f"{name} {getattr(device.passes, name):.2f}" for name in MEASURED_PASSES)
    console.print(f"together, in multiples of what kernels at these rates take: {factors}")
