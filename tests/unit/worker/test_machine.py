from __future__ import annotations

from pathlib import Path

from tests.unit.worker.machines import GIB, RTX4090, T4, machine
from worker.machine import gib, measure, parse_gpus, visible, writable


def test_what_the_driver_prints_is_read_and_nonsense_left_out() -> None:
    text = "NVIDIA GeForce RTX 4090, 24564, 23000, 8.9, 580.95.05\nno devices\nTesla T4, many, 1, 7.5, 580\n"
    (gpu,) = parse_gpus(text)
    assert (gpu.name, gpu.memory, gpu.free) == ("NVIDIA GeForce RTX 4090", 24564 << 20, 23000 << 20)
    assert (gpu.capability, gpu.driver) == ((8, 9), "580.95.05")


def test_this_machine_is_measured_whatever_it_is(tmp_path: Path) -> None:
    found = measure(tmp_path / "not" / "there" / "yet")
    assert found.cpus >= 1 and found.memory_free > 0 and found.disk_free > 0


def test_gpus_that_are_hidden_from_the_engine_do_not_count() -> None:
    both = (RTX4090, T4)
    assert visible(both, None) == both
    assert visible(both, "") == ()
    assert visible(both, "1") == (T4,)
    assert visible(both, "1,0,7") == (T4, RTX4090)
    assert visible(both, "GPU-8f2c") == both


def test_a_machine_in_words() -> None:
    assert machine(RTX4090).words == "NVIDIA GeForce RTX 4090 (24.0 GiB, 23.0 GiB free)"
    assert machine(memory=3 * GIB).words == "8 CPU cores, 3.0 GiB of memory free, no GPU"
    assert gib(5 << 20) == "5 MiB"


def test_a_folder_that_is_a_file_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert writable(tmp_path / "new") == ""
    assert writable(tmp_path / "file" / "home") == "Not a directory"
