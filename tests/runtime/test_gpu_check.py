"""The check of a machine with one GPU, in small on the CPU: it runs to its end."""

from __future__ import annotations

import pytest

from benchmarks import gpu_check
from jaxpipe.planning.devices import Device, find


@pytest.mark.slow
def test_its_tables_and_the_device_that_plans_read(tmp_path):
    tables = gpu_check.main(gpu_check.SMALL, tmp_path)
    assert [row["step"] for row in tables["steps"]] == [
        *("plain scan, dots", "plain loop, dots", "1f1b, unrolled, dots")
    ]
    assert min(row["of plain"] for row in tables["steps"][:2]) == 1.0
    assert all(row["ms"] > 0 for rows in tables.values() for row in rows)
    device = find(str(tmp_path / "gpu_check_device.json"))
    assert isinstance(device, Device)
    best = max(row["T/s"] for row in tables["rates"] if row["program"].startswith("matmul"))
    assert device.efficiency.flops == best * 1e12 / device.flops
