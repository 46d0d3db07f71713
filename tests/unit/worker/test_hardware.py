from __future__ import annotations

from pathlib import Path

import pytest

from worker.hardware import default_concurrency, describe, devices


def driver(folder: Path, script: str) -> str:
    """A PATH on which nvidia-smi is this script."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("printf 'NVIDIA H200\\nNVIDIA H200\\n'", "2× NVIDIA H200"),
        ("printf 'NVIDIA L4\\nNVIDIA T4\\nNVIDIA L4\\n'", "2× NVIDIA L4, 1× NVIDIA T4"),
    ],
)
def test_gpus_are_named_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: str
) -> None:
    monkeypatch.setenv("PATH", driver(tmp_path, script))
    assert describe() == expected


@pytest.mark.parametrize(("longest", "at_once"), [(256, 64), (4096, 64), (4100, 63), (16_384, 16), (100_000, 8)])
def test_a_gpu_does_as_many_at_once_as_the_memory_for_proofs_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: int, at_once: int
) -> None:
    monkeypatch.setenv("PATH", driver(tmp_path, "echo NVIDIA L4"))
    assert default_concurrency(longest) == at_once
    monkeypatch.setenv("PATH", "/nowhere")
    assert default_concurrency(longest) == 8


def test_without_a_driver_the_processor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cores" in describe()


def test_a_failing_driver_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", driver(tmp_path, "exit 9"))
    assert "cores" in describe()


def test_a_long_list_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", driver(tmp_path, "for i in 1 2 3 4 5 6 7 8 9; do echo Some-Very-Long-GPU-Name-$i; done"))
    assert len(describe()) == 128


def test_the_class_names_kinds_of_device_and_no_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", driver(tmp_path, "printf 'NVIDIA L4\\nNVIDIA L4\\n'"))
    assert devices() == ("NVIDIA L4", "NVIDIA L4")
    monkeypatch.setenv("PATH", "/nowhere")
    (cpu,) = devices()
    assert cpu.endswith(" CPU")
