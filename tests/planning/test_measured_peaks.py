"""`jaxpipe measure`, and what a plan makes of its file."""

import dataclasses
import json
import math

import jax
import pytest
from synthetic import synthetic

from jaxpipe import cli
from jaxpipe.errors import ArgumentError
from jaxpipe.planning import cost, devices, measured_peaks
from jaxpipe.planning.plans import PlacedPlan, Plan
from jaxpipe.runtime.zero import Zero

MODEL = synthetic(width=512)
PLAN = Plan(2, 2, 1, 1, 1, "1f1b", 1, 4, 4, "none", Zero(0), 1, "stacked")
PEAKS = devices.Peaks(500e12, 2e12, 300e9, 200e9, 5e-6)


def measured(kind: str = "NVIDIA H100 80GB HBM3") -> devices.Device:
    return devices.measured(kind, PEAKS, memory_bytes=None, source="test")


def test_a_step_takes_what_was_measured():
    device = measured()
    prompt = dataclasses.replace(device, latency=0.0)
    slow, fast = (
        PlacedPlan(PLAN, MODEL, devices.cluster(one, 4, link="nvlink:4,ib:400"))
        for one in (device, prompt)
    )
    flops = devices.SUSTAINED * PEAKS.flops  # a step of training attains less than a matmul alone
    assert fast.cluster.flops == pytest.approx(flops)
    assert fast.cluster.bandwidth == pytest.approx(PEAKS.bandwidth)
    assert fast.cluster.within == pytest.approx(min(PEAKS.message, PEAKS.collective))
    took, expected = cost.layer_costs(slow), cost.layer_costs(fast)
    layer = slow.sizes.layers[0]
    kernel = layer.f.flops(PLAN.rows) / flops + devices.LAUNCH_SECONDS
    read = 2 * MODEL.compute_bytes * layer.parameters / PEAKS.bandwidth  # out of the stack
    launches = devices.LAUNCH_SECONDS * len(layer.shapes)
    assert expected.f == pytest.approx(kernel + read + launches)
    assert took.message - expected.message == pytest.approx(PEAKS.latency)


def test_a_known_device_keeps_its_peaks_and_an_unknown_one_has_those_that_were_measured():
    known = measured()
    assert (known.name, known.flops) == ("h100", devices.DEVICES["h100"].flops)
    assert known.efficiency.flops == pytest.approx(500 / 989)
    other = measured("another")
    assert (other.name, other.flops, other.efficiency.flops) == ("cpu", PEAKS.flops, 1.0)


def test_the_command_measures_and_plans_read_its_file(tmp_path, capsys, monkeypatch):
    assert jax.device_count() == 8  # those of conftest.py, before a command simulates fewer
    out, sizes = tmp_path / "measured.json", tmp_path / "sizes.json"
    sizes.write_text(MODEL.to_json())
    monkeypatch.setattr(measured_peaks, "_ON_CPUS", (64, "float32", 2**18, 2**16))
    assert cli.main(["measure", "--out", str(out), "--devices", "2"]) == 0
    assert "of gathers and reductions" in capsys.readouterr().out
    device = devices.find(str(out))
    assert device.name == "cpu"
    rates = device.flops, device.bandwidth, device.within_host, device.latency
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates)

    plan = ["plan", "--sizes", str(sizes), "--devices", "2", "--device", str(out)]
    assert cli.main(plan) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "measured are" in printed
    assert "measured on 2 x cpu" in printed
    compare = ["compare", "1f1b", "--layer-model", str(sizes), "--device", str(out)]
    mesh = ["--stages", "2", "--microbatches", "4", "--remat", "none"]
    assert cli.main([*compare, *mesh]) == 0

    assert cli.main(["measure", "--out", str(out), "--devices", "64"]) == 2
    assert "--devices 64 is too many to simulate" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["no JSON", "[]", "{}", '{"device": {"name": "x"}}', pytest.param("[" * 100_000, id="deep")],
)
def test_files_of_something_else_are_refused(text, tmp_path):
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match="holds no measured device"):
        devices.find(str(path))


def test_numbers_below_zero_are_refused(tmp_path):
    path, device = tmp_path / "m.json", dataclasses.asdict(measured())
    path.write_text(json.dumps({"device": device}))
    assert devices.find(str(path)) == measured()
    path.write_text(json.dumps({"device": device | {"flops": -1.0}}))
    with pytest.raises(ArgumentError, match="a number is below 0"):
        devices.find(str(path))
