"""What the API's own description allows, and what it just does not, as schemathesis makes it; every answer is held to it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import hypothesis
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from coordinator.operators import Role
from tests.adversary.fuzz.site import Report, Site

_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
_STREAM = "/api/v1/changes"
_TIMEOUT_S = 60.0


def try_described(site: Site, count: int, report: Report, seed: int = 0) -> None:
    """About `count` requests over all operations, by an admin."""
    document = requests.get(f"{site.url}/api/v1/openapi.json", timeout=_TIMEOUT_S).json()
    del document["paths"][_STREAM]
    operations = list(_operations(document))
    with requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {site.tokens[Role.ADMIN]}"
        for operation in operations:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                _try(operation, mode, max(1, count // (2 * len(operations))), site.url, session, report, seed)


def _operations(document: dict[str, Any]) -> Iterator[Any]:
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        yield found.ok()


def _try(
    operation: Any, mode: GenerationMode, count: int, url: str, session: requests.Session, report: Report, seed: int
) -> None:
    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        response = case.call(base_url=url, session=session, timeout=_TIMEOUT_S)
        report.answers[f"described {response.status_code}"] += 1
        try:
            case.validate_response(response, checks=_CHECKS)
        except Exception as failed:
            report.bad(f"described {operation.label} ({mode.name}): {failed!r:.600}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            one()
        except (
            hypothesis.errors.Unsatisfiable
        ):  # nothing is wrong that could be made of an operation without parameters
            report.answers["described, nothing to make"] += 1
