"""The `[trainer]` section of the run file, and the few fields of other sections that the trainer needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from protocol.errors import UserError, explain_validation
from protocol.runfile import read_run_file
from trainer.alarms import Alarms


class TrainerConfig(BaseModel):
    """How the run trains. Paths are relative to the run file; docs/run-file.md says what each field means.

    `coordinator`: its private listener, `host:port`, or `https://host:port` for TLS; `coordinator_ca`: the authority of its
    certificate, if it is not a public one.
    `versions`: policy versions to publish after version 0, then the trainer ends. `learning_rate` etc.: trainer.optim.
    `behaviour_tolerance`: how far, in nats, a worker's log-probs may differ from the trusted ones and still be used;
    0 uses the trusted ones alone. `token_budget`: padded tokens per microbatch. `full_every`: each so-manyth version is
    for name in ("teacher", "tensorboard"):
        if getattr(config, name) is not None:
            paths[name] = folder / getattr(config, name)
