"""What a run has chosen is kept: by its resume, and by all of its processes."""

import contextlib
import dataclasses
import io
import json
import random
from pathlib import Path

import pytest
import tiny_tasks
from rich.console import Console

from jaxpipe.schedule import catalog
from jaxpipe.schedule.device_clock import device_clock
from jaxpipe.schedule.formats import to_json
from jaxpipe.schedule.offload import kept_on_devices, parts_of
from jaxpipe.schedule.partition import chunk_costs
from jaxpipe.schedule.simulate import Costs, peak_in_flight
from train import choice, loop, pipeline_section, step
from train.choice import Choice
from train.config import Config
from train.config_file import load_yaml
from train.processes import distributed
from train.step import Setup


def _config(task="gpt", **sections):
    """A configuration whose schedule is found; sections add to the fields here."""
    base = {
        "model": {"num_layers": 4},
        "mesh": {"stage": 2, "data": 1},
        "pipeline": {"schedule": "auto", "microbatches": 4, "partition": "equal"},
    }
    merged = {name: base.get(name, {}) | fields for name, fields in sections.items()}
    return tiny_tasks.config(task, **base | merged)


def _choice(config):
    """The configured schedule, with as many layers in every chunk."""
    order, layers = pipeline_section.order(config), config.num_layers
    chunks = order.placement.num_virtual_stages
    return Choice(order, (layers // chunks,) * chunks, (1.0,) * layers, "split")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "schedule.json"


@pytest.fixture
def recorded(path):
    found = _choice(_config())
    choice.write_choice(path, _config(), found)
    return found


def test_the_first_command_trains_with_little_bubble():
    config = Config(**load_yaml(Path("configs/gpt-tiny.yaml")))
    schedule = pipeline_section.order(config)
    chunks = schedule.placement.num_virtual_stages
    costs = chunk_costs(pipeline_section.costs(config), [1.0] * 8, [8 // chunks] * chunks)
    assert device_clock(schedule, costs).bubble_ratio <= 0.12


def test_auto_places_a_models_layers_unless_they_are_placed():
    few = {"microbatches": 2}
    assert pipeline_section.order(_config(pipeline=few, costs={"message": 9.0})).num_chunks == 1
    placed = few | {"partition": "1,1,1,1"}
    assert pipeline_section.order(_config(pipeline=placed)).num_chunks == 2


def test_auto_may_keep_more_in_flight_than_devices_keep():
    """A slow bus carries less: then fewer are in flight."""
    shape = {"mesh": {"stage": 4}, "model": {"num_layers": 8}}
    pipeline = {"microbatches": 16, "residuals": 1.5}
    for offload, more in ((0.5, True), (9.0, False)):
        config = _config(**shape, pipeline=pipeline, costs={"offload": offload})
        schedule = pipeline_section.searched(config, [1.0] * 8)
        kept = kept_on_devices(schedule, parts_of(offload, [pipeline_section.costs(config)]))
        assert max(kept) <= 1.5 * schedule.num_chunks
        assert (max(peak_in_flight(schedule)) > 1.5 * schedule.num_chunks) == more


def test_auto_counts_that_later_slices_take_longer():
    """zb-h2, whose long warm-up is slack for later slices; without attention, two chunks."""
    sliced = {"mesh": {"stage": 4}, "pipeline": {"sequence_slices": 4}, "model": {"num_layers": 8}}
    for attention, chunks in ((0.0, 2), (0.5, 1)):
        config = _config(**sliced, costs={"attention": attention})
        found = pipeline_section.searched(config, [1.0] * 8)
        assert (found.num_slices, found.num_chunks) == (4, chunks)


def test_only_a_setting_that_decides_has_the_schedule_chosen_anew(path, recorded):
    assert choice.read_choice(path, _config()) == recorded
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    for section, fields in (
        *(("train", {"steps": 50}), ("train", {"batch_size": 16}), ("mesh", {"data": 2})),
        *(("optimizer", {"peak_lr": 0.1}), ("model", {"dropout": 0.1}), ("data", {"path": "b"})),
        ("pipeline", {"remat": "none"}),  # as before there was "auto"
    ):
        assert choice.read_choice(path, _config(**{section: fields})) == recorded, fields
    for section, fields in (
        *(("mesh", {"stage": 4}), ("model", {"num_layers": 8}), ("pipeline", {"microbatches": 8})),
        *(("pipeline", {"schedule": "1f1b"}), ("pipeline", {"chunks": 2})),
        *(("pipeline", {"memory_limit": 1.0}), ("pipeline", {"partition": "flops"})),
        ("pipeline", {"remat": "full"}),
        *(("costs", {"b": 2.0}), ("costs", {"message": 0.5})),
    ):
        assert choice.read_choice(path, _config(**{section: fields})) is None, fields
    assert choice.read_choice(path, _config("bert")) is None


def test_a_field_of_a_newer_version_counts_as_its_default(path, recorded):
    record = json.loads(path.read_text())
    del record["settings"]["pipeline.weight_slots"]
    record["settings"]["pipeline.forgotten"] = 3
    path.write_text(json.dumps(record))
    assert choice.read_choice(path, _config()) == recorded
    assert choice.read_choice(path, _config(pipeline={"weight_slots": 2})) is None


@pytest.mark.parametrize(
    "kind", ["missing", "whole", "damaged", "nested", "of other settings", "a folder"]
)
def test_a_resume_says_what_it_does_with_the_record(path, recorded, kind):
    if kind == "damaged":
        path.write_text(path.read_text()[:-100])
    elif kind != "whole":
        path.unlink()
    if kind == "of other settings":
        choice.write_choice(path, _config(costs={"b": 2.0}), recorded)
    if kind == "a folder":
        path.mkdir()
    if kind == "nested":
        path.write_text("[" * 10**5)
    said = io.StringIO()
    found = loop.recorded_choice(path, _config(), Console(file=said))
    assert found == (recorded if kind == "whole" else None)
    anew = f"{path} cannot be used, and the schedule is chosen anew: "
    lines = {
        "whole": f"schedule and partition as recorded in {path}\n",
        "damaged": f"{anew}it is not a record: ",
        "nested": f"{anew}it is not a record: it nests too deeply",
        "a folder": f"{anew}[Errno 22] it is not a regular file",
    }
    assert said.getvalue().startswith(lines.get(kind, ""))
    assert said.getvalue().count("\n") == (kind in lines)


def test_a_damaged_record_is_refused_in_one_line(path, recorded):
    record, schedule = json.loads(path.read_text()), to_json(recorded.schedule)
    other = [
        dataclasses.replace(catalog.build("1f1b", stages=p, microbatches=m), name="auto")
        for p, m in ((4, 4), (2, 6))
    ]
    for field, value in (
        *(("settings", None), ("settings", [1]), ("schedule", None), ("schedule", {})),
        ("schedule", schedule | {"orders": schedule["orders"][::-1]}),
        *(("schedule", to_json(order)) for order in other),
        *(("layer_counts", counts) for counts in (None, [4], [4, 0], [2, 3], ["2", "2"])),
        *(("layer_costs", costs) for costs in ([1.0], [1.0, 1.0, 1.0, float("nan")], "1111")),
    ):
        path.write_text(json.dumps(record | {field: value}))
        with pytest.raises(ValueError, match=r"\A.+\Z"):  # one line, whatever is damaged
            choice.read_choice(path, _config())


def test_no_damage_of_the_bytes_does_more_than_refuse(path, recorded):
    whole, random_ = path.read_bytes(), random.Random(0)
    for _ in range(300):
        data = bytearray(whole[: random_.choice([len(whole), random_.randrange(len(whole))])])
        if data:
            data[random_.randrange(len(data))] = random_.randrange(256)
        path.write_bytes(data)
        found = None
        with contextlib.suppress(ValueError):
            found = choice.read_choice(path, _config())
        # A name or a cost that still fits may be another.
        assert found is None or found.schedule.orders == recorded.schedule.orders


def test_an_edited_schedule_of_a_users_own_is_read_anew(path, tmp_path):
    own = tmp_path / "own.csv"
    own.write_text("0F0,0B0,0F1,0B1\n,1F0,1B0,1F1,1B1\n")
    config = _config(pipeline={"schedule": str(own), "microbatches": 2})
    choice.write_choice(path, config, _choice(config))
    assert choice.read_choice(path, config) is not None
    pipeline_section.order.cache_clear()
    own.write_text("0F0,0F1,0B0,0B1\n,1F0,1F1,1B0,1B1\n")
    assert choice.read_choice(path, config) is None


def test_a_program_keeps_what_was_recorded(monkeypatch):
    """Whatever a newer version would find or measure."""
    config = _config(pipeline={"partition": "1,1,1,1"})
    other = _choice(_config(pipeline={"schedule": "v-min"}))
    choices = _choice(config), other
    assert other.schedule.orders != choices[0].schedule.orders

    def fail(*args, **options):
        raise AssertionError("searched again")

    monkeypatch.setattr(pipeline_section, "order", fail)
    monkeypatch.setattr(step, "layer_costs", fail)
    monkeypatch.setattr(step, "end_costs", fail)
    for kept in choices:
        setup = Setup(config, kept)
        assert setup.choice == kept
        assert setup.pipe.table.schedule == kept.schedule


def test_a_measured_partition_is_not_measured_again(monkeypatch, path):
    pipeline, costs = {"schedule": "1f1b", "partition": "measured"}, [9.0, 1.0, 1.0, 1.0]
    config = tiny_tasks.config("toy_family:Uneven", pipeline=pipeline)

    def measure(pipe, batch, rng, *, measure):
        assert measure
        return [Costs(cost, cost, cost) for cost in costs]

    monkeypatch.setattr(step, "layer_costs", measure)
    monkeypatch.setattr(step, "end_costs", lambda *_, measure: (0.0, 0.0))
    first = Setup(config)
    assert first.layer_counts == (1, 3)
    assert first.layer_costs == (27.0, 3.0, 3.0, 3.0)
    choice.write_choice(path, config, first.choice)
    costs.reverse()
    assert Setup(config).layer_counts == (3, 1)
    assert Setup(config, choice.read_choice(path, config)).layer_counts == (1, 3)


def test_all_processes_use_the_choice_of_the_first(monkeypatch):
    first = _choice(_config(pipeline={"schedule": "zb-v"}))
    monkeypatch.setattr(distributed, "from_first", lambda make: first.to_json())
    assert Setup(_config()).schedule == first.schedule


def test_the_layout_is_left_to_the_library_unless_one_must_be_stacked():
    for options, expected in (
        ({}, "auto"),
        ({"update": "chunk"}, "stacked"),
        ({"schedule": "pipemare"}, "stacked"),
        ({"weights": "unrolled"}, "unrolled"),
    ):
        assert pipeline_section.weights(Config(pipeline=options)) == expected, options


def test_updates_by_chunk_keep_the_fewest_chunks():
    for options, slots in (
        ({}, None),
        ({"update": "chunk"}, 1),
        ({"update": "chunk", "weight_slots": 3}, 3),
        ({"weight_slots": 3}, 3),
    ):
        assert pipeline_section.weight_slots(Config(pipeline=options)) == slots, options
    assert pipeline_section.remat(Config(pipeline={"schedule": "pipemare"})) == "none"
