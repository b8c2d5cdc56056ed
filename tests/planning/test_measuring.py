"""`jaxpipe measure`, and what a plan makes of its file."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib.metadata import EntryPoint

import jax
import pytest

from jaxpipe import cli
from jaxpipe.errors import ArgumentError
from jaxpipe.planning import configurations, cost, devices
from jaxpipe.planning.plans import Placed, Plan
from jaxpipe.planning.sizes import Kernel, LayerSizes, Linear, ModelSizes, Pass, Sizes, Variant

CONFIG = """
model: {vocab_size: 256, sequence_length: 64, num_layers: 4, width: 48, num_heads: 3}
train: {batch_size: 16, steps: 40}
"""
NOTHING = Linear(0, 0)
MATMUL = Pass((Kernel(Linear(0, 1e12), Linear(1e9, 0)),), NOTHING, ())
LAYER = LayerSizes(
    *(MATMUL, MATMUL, MATMUL, 10**6),
    *[NOTHING] * 4,
    ((1000, 1000),),
)
MODEL = ModelSizes(
    "equal", 64, 4, 2, 2, 32, 256,
    {Variant(1, 1, "none"): Sizes((LAYER,), (0,) * 4, Linear(0, 1e6), 10, 10, MATMUL, NOTHING)},
)  # fmt: skip
PLAN = Plan(2, 2, 1, 1, 1, "1f1b", 1, 4, 4, "none", 0, 1, "stacked")
PEAKS = devices.Peaks(500e12, 2e12, 300e9, 200e9, 5e-6)


@pytest.fixture
def trainers_reader(monkeypatch):
    assert jax.device_count() == 8  # those of conftest.py, before a command simulates fewer
    point = EntryPoint("train", "train.plan:read", configurations.GROUP)
    monkeypatch.setattr(configurations, "entry_points", lambda group: [point])


def timed(name: str, seconds: float, expected: float) -> devices.Timed:
    return devices.Timed(name, "none", 4, 2, seconds, expected)


def calibrated(factors: dict[str, float], kind: str = "NVIDIA H100 80GB HBM3"):
    passes = [timed(name, factor * 2.0, 2.0) for name, factor in factors.items()]
    return devices.calibrate(kind, PEAKS, passes, memory_bytes=None, source="test")


def test_a_step_takes_what_was_measured():
    device = calibrated({"f": 1.5, "b": 2.0, "w": 3.0, "update": 4.0}).device
    bare = dataclasses.replace(device, passes=devices.Passes(), latency=0.0)
    slow, fast = (
        Placed(PLAN, MODEL, devices.cluster(one, 4, link="nvlink:4,ib:400"))
        for one in (device, bare)
    )
    assert fast.cluster.flops == pytest.approx(PEAKS.flops)
    assert fast.cluster.bandwidth == pytest.approx(PEAKS.bandwidth)
    assert fast.cluster.within == pytest.approx(min(PEAKS.message, PEAKS.collective))
    took, expected = cost.layer_costs(slow), cost.layer_costs(fast)
    kernel = 4 * 1e12 / PEAKS.flops + devices.LAUNCH_SECONDS  # of four rows; F, B and W alike
    assert took.f - expected.f == pytest.approx(0.5 * kernel)
    assert took.b - expected.b == pytest.approx(1.0 * kernel)
    assert took.w - expected.w == pytest.approx(2.0 * kernel)
    assert took.message - expected.message == pytest.approx(PEAKS.latency)


def test_a_known_device_keeps_its_peaks_and_an_unknown_one_has_those_that_were_measured():
    factors = dict.fromkeys(devices.MEASURED_PASSES, 1.0)
    known = calibrated(factors).device
    assert (known.name, known.flops) == ("h100", devices.DEVICES["h100"].flops)
    assert known.efficiency.flops == pytest.approx(500 / 989)
    other = calibrated(factors, kind="another").device
    assert (other.name, other.flops, other.efficiency.flops) == ("cpu", PEAKS.flops, 1.0)


def test_passes_are_weighed_by_their_layers_and_times():
    few = dataclasses.replace(timed("f", 3.0, 1.0), count=1)
    many = dataclasses.replace(timed("f", 10.0, 10.0), count=3)
    rest = [timed(name, 1.0, 1.0) for name in ("b", "w", "update")]
    found = devices.calibrate("cpu", PEAKS, [few, many, *rest], memory_bytes=None, source="test")
    assert found.device.passes.f == pytest.approx((3 + 30) / (1 + 30))


def test_the_command_measures_and_plans_read_its_file(trainers_reader, tmp_path, capsys):
    config, out, sizes = (tmp_path / name for name in ("c.yaml", "measured.json", "sizes.json"))
    config.write_text(CONFIG)
    given = ["--devices", "2", "--rows", "1", "2", "--remat", "none"]
    assert cli.main(["measure", "--config", str(config), "--out", str(out), *given]) == 0
    assert "together, in multiples of what kernels at these rates take" in capsys.readouterr().out
    data = json.loads(out.read_text())
    measured = {(one["name"], one["rows"]): one for one in data["timed"]}
    assert set(measured) == {("update", 0), *((p, rows) for p in "fbw" for rows in (1, 2))}
    assert {one["count"] for one in data["timed"]} == {4}
    assert all(one["seconds"] > 0 and one["expected"] > 0 for one in data["timed"])
    assert all(math.isfinite(value) for value in data["peaks"].values())

    found = devices.find(str(out))
    assert found.name == "cpu"
    for name in "fbw":
        seconds, expected = (
            sum(one[key] for one in data["timed"] if one["name"] == name)
            for key in ("seconds", "expected")
        )
        assert getattr(found.passes, name) * expected == pytest.approx(seconds)

    plan = ["plan", "--config", str(config), "--devices", "2", "--device", str(out)]
    assert cli.main([*plan, "--write-sizes", str(sizes)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "measured are" in printed
    assert f"measured on 2 x cpu with {config.stem}" in printed
    assert f"Measured F, B and W take {found.passes.f:.2f}, {found.passes.b:.2f}" in printed
    compare = ["compare", "1f1b", "--layer-model", str(sizes), "--device", str(out)]
    assert cli.main([*compare, "--stages", "2", "--microbatches", "4"]) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--out", "m.yaml"], "--out m.yaml must end in .json"),
        (["--out", "m.json", "--devices", "1"], "--devices 1 must be at least 2"),
        (["--out", "m.json", "--rows", "0"], "--rows 0 must be at least 1"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, text, capsys):
    assert cli.main(["measure", "--config", "x.yaml", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_too_many_devices_are_not_simulated(trainers_reader, tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG)
    given = ["--config", str(config), "--out", str(tmp_path / "m.json"), "--devices", "64"]
    assert cli.main(["measure", *given]) == 2
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
    path = tmp_path / "m.json"
    found = calibrated(dict.fromkeys(devices.MEASURED_PASSES, 1.0))
    path.write_text(found.to_json())
    assert devices.find(str(path)) == found.device
    wrong = dataclasses.replace(found, device=dataclasses.replace(found.device, flops=-1.0))
    path.write_text(wrong.to_json())
    with pytest.raises(ArgumentError, match="a number is below 0"):
        devices.find(str(path))
