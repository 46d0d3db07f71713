from __future__ import annotations

import json

from worker.status import Status


def test_the_rate_is_of_the_last_half_minute() -> None:
    status = Status()
    status.count_tokens(300, now=100.0)
    status.count_tokens(600, now=120.0)
    assert status.tokens_per_second(now=120.0) == 30.0
    assert status.tokens_per_second(now=131.0) == 20.0
    assert status.tokens_per_second(now=500.0) == 0.0
    assert status.generated_tokens == 900


def test_what_is_forgotten_takes_no_memory() -> None:
    status = Status()
    for second in range(1000):
        status.count_tokens(1, now=float(second))
    assert len(status._tokens) <= 32


def test_the_json_form_has_every_public_field_and_the_rate() -> None:
    status = Status(phase="working", credits=7)
    values = json.loads(json.dumps(status.as_dict()))
    assert (values["phase"], values["credits"], values["tokens_per_second"]) == ("working", 7, 0.0)
    assert not any(name.startswith("_") for name in values)
