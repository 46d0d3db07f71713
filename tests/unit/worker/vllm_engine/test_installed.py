"""What is said where vLLM can't be imported."""

from __future__ import annotations

import sys

import pytest

from worker.vllm_engine import installed


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("pass", ""),
        (
            "raise RuntimeError('operator torchvision::nms does not exist')",
            "RuntimeError: operator torchvision::nms does",
        ),
        ("import sys; sys.exit(3)", "its import ended with status 3"),
        ("import time; time.sleep(60)", "its import took more than 1 s"),
    ],
)
def test_the_last_words_of_an_import_are_told(monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    monkeypatch.setattr(installed, "_IMPORT", code)
    monkeypatch.setattr(installed, "_IMPORT_S", 1.0 if "sleep" in code else 60.0)
    found = installed.import_problem()
    assert found.startswith(said) and bool(found) == bool(said)


def test_a_build_that_is_not_torchs_is_named_with_its_removal() -> None:
    told = installed.remedy_of("RuntimeError: operator torchvision::nms does not exist")
    assert told.startswith(f"`{sys.executable} -m pip uninstall torchvision torchaudio torchcodec`")
    assert installed.remedy_of("OSError: [Errno 28] No space left on device") == ""
