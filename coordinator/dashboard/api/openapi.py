"""The API's description (OpenAPI 3.1), made from the endpoints' declarations. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from coordinator.dashboard.access import COOKIE
from coordinator.dashboard.api.answers import Failure
from coordinator.dashboard.api.endpoint import JSON, TEXT_MAX, Endpoint

_REF = "#/components/schemas/{model}"
_SECURITY = {
    "operator": {
        "type": "http",
        "scheme": "bearer",
        "description": "A token by `coordinator token create --role viewer|operator|admin`.",
    },
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE,
        "description": "A browser's session, by /login. It reads; to act, a bearer token is asked for.",
    },
    "worker": {
        "type": "http",
        "scheme": "bearer",
        "description": "The token that a worker got when it registered: it is told of itself.",
    },
}
_ABOUT = (
    "What the dashboard shows and does. Aggregates and the leaderboard are public; what tells of single workers is for viewers "
    'and for the worker itself. Every refusal is `{"error": "…"}`.'
)


def describe(endpoints: Sequence[Endpoint], *, version: str) -> dict[str, Any]:
    """The whole document."""
    schemas, components = _schemas(endpoints)
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Rollswarm coordinator", "version": version, "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY},
    }


def _schemas(endpoints: Sequence[Endpoint]) -> tuple[dict[tuple[str, str], Any], dict[str, Any]]:
    """Schemas by (operation, what), and the named ones that they refer to."""
    inputs: list[tuple[tuple[str, str], JsonSchemaMode, TypeAdapter[Any]]] = [
        (("", "failure"), "serialization", TypeAdapter(Failure))
    ]
    for endpoint in endpoints:
        name = operation_id(endpoint)
        inputs.append(((name, "answer"), "serialization", endpoint.adapter))
        if endpoint.body is not None:
            inputs.append(((name, "body"), "validation", TypeAdapter(endpoint.body)))
    found, definitions = TypeAdapter.json_schemas(inputs, ref_template=_REF)
    return {key: schema for (key, _), schema in found.items()}, definitions.get("$defs", {})


def operation_id(endpoint: Endpoint) -> str:
    """Unique, and a name that code generators can use."""
    return "_".join([endpoint.method.lower(), *re.findall(r"\w+", endpoint.path)[2:]])


def _operation(endpoint: Endpoint, schemas: dict[tuple[str, str], Any]) -> dict[str, Any]:
    name = operation_id(endpoint)
    failure = {"application/json": {"schema": schemas["", "failure"]}}
    responses: dict[str, Any] = {}
    for status in endpoint.statuses:
        content = failure if status != 200 else {endpoint.media: {"schema": schemas[name, "answer"]}}
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": content}
    operation: dict[str, Any] = {
        "operationId": name,
        "summary": endpoint.summary,
        "tags": ["act" if endpoint.body is not None else "read"],
        "parameters": [*_path_parameters(endpoint), *_query_parameters(endpoint.query)],
        "responses": responses,
        "security": _security(endpoint),
    }
    if endpoint.needs is not None:
        operation["x-role"] = endpoint.needs.name.lower()
    if endpoint.body is not None:
        body = {JSON: {"schema": schemas[name, "body"]}}
        operation["requestBody"] = {"required": bool(endpoint.body.model_fields), "content": body}
    return operation


def _path_parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    schema = {"type": "string", "minLength": 1, "maxLength": TEXT_MAX}
    return [{"name": name, "in": "path", "required": True, "schema": schema} for name in endpoint.parameters]


def _query_parameters(query: type[BaseModel]) -> list[dict[str, Any]]:
    properties = query.model_json_schema().get("properties", {})
    found = []
    for name, schema in properties.items():
        text = schema.pop("description", "")
        schema.pop("title", None)
        # What is null where it is left out: a query has no way to say null.
        if "anyOf" in schema:
            (kind,) = (each for each in schema.pop("anyOf") if each.get("type") != "null")
            schema |= kind
            schema.pop("default", None)
        found.append({"name": name, "in": "query", "required": False, "description": text, "schema": schema})
    return found


def _security(endpoint: Endpoint) -> list[dict[str, list[str]]]:
    """Any one of these will do; {} means that none is needed."""
    if endpoint.needs is None:
        return [{}, {"operator": []}, {"session": []}]
    if endpoint.body is not None:
        return [{"operator": []}]
    own: list[dict[str, list[str]]] = [{"worker": []}] if endpoint.own else []
    return [{"operator": []}, {"session": []}, *own]
