"""``jaxpipe measure``: the rates that devices attain."""

import dataclasses
import json
from pathlib import Path

from jaxpipe import gpu_flags
from jaxpipe.commands.printing import output_console, prefixed
from jaxpipe.planning.devices import Device, Peaks, measured
from jaxpipe.schedule.problems import Problem, refuse

_SIMULATED = 2
_MOST_SIMULATED = 8


def measure(*, out: Path, devices: int | None = None) -> None:
    """Time a matmul, copies, messages and collectives on the devices that jax has.

    The file takes the place of a device's name: `jaxpipe plan --device FILE`, `jaxpipe compare
    --layer-model SIZES --device FILE`. All devices work at once, as in a step.

    Args:
      out: the .json file to write.
      devices: number of devices, at least 2; by default all GPUs. Without GPUs, this many CPU
        devices are simulated, up to 8 and 2 by default; they share the cores of the machine.
    """
    refuse(_problems(out, devices))
    gpu_flags.apply()
    count = _available(devices)

    import jax

    from jaxpipe.planning.measured_peaks import peaks

    used = jax.devices()[:count]
    kind, memory = used[0].device_kind, (used[0].memory_stats() or {}).get("bytes_limit")
    attained = peaks(used)
    device = measured(kind, attained, memory_bytes=memory, source=f"measured on {count} x {kind}")
    out.write_text(json.dumps({"device": dataclasses.asdict(device)}, indent=1) + "\n", "utf-8")
    console = output_console()
    console.print(_in_words(device, attained))
    console.print(f"{out} is written: jaxpipe plan --config FILE --devices N --device {out}")


def _problems(out: Path, devices: int | None) -> list[Problem]:
    problems = []
    if out.suffix != ".json":
        rule = "must end in .json, by which `plan` and `compare` know it"
        problems.append(Problem("out", str(out), rule, (str(out.with_suffix(".json")),)))
    if devices is not None and devices < 2:
        rule = "must be at least 2: a message needs two"
        problems.append(Problem("devices", devices, rule, (2,)))
    return problems


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


def _in_words(device: Device, peaks: Peaks) -> str:
    return (
        f"{device.source}: {prefixed(peaks.flops, 'FLOP/s')} of matmuls "
        f"({device.efficiency.flops:.0%} of the peak), {prefixed(peaks.bandwidth, 'B/s')} of "
        f"memory ({device.efficiency.memory:.0%}), {prefixed(peaks.message, 'B/s')} of a message "
        f"and {prefixed(peaks.collective, 'B/s')} of gathers and reductions "
        f"({device.efficiency.link:.0%}), and {peaks.latency * 1e6:.3g} us of each"
    )
