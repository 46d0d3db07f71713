"""The run's terms, as `GET /.well-known/rollswarm.json` serves them, and the protocol version handshake."""

from __future__ import annotations

import json
import math
import re
from dataclasses import MISSING, asdict, dataclass
from typing import Any

from protocol.errors import BadSignature, UserError
from protocol.joining import INVITE, OPEN, WORK, WORK_BITS_MAX
from protocol.signing import public_key
from protocol.turns import ANSWER_TOKENS_MAX, CALLS_MAX, STOP_TOKENS_MAX, TurnRules

PROTOCOL_MIN = 1
PROTOCOL_MAX = 2
TURNS_PROTOCOL = 2  # the first that knows rollouts of several turns; a run without any is served as by the one before
WELL_KNOWN_PATH = "/.well-known/rollswarm.json"
_TERMS_BYTES_MAX = 1 << 20
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # protocol.manifest's rule
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "str | None": (str, type(None)),
    "tuple[str, ...]": (str,),
    "tuple[int, ...]": (int,),
    "tuple[TurnRules, ...]": (dict,),
}


@dataclass(frozen=True, slots=True)
class RunTerms:
    """What a worker must know before it joins. Keys are pinned at the first visit."""

    run_id: str
    name: str
    protocol_min: int
    protocol_max: int
    grpc_endpoints: tuple[str, ...]  # host:port
    relays: tuple[str, ...]  # base URLs of SHARDCAST sources
    coordinator_key: str
    trainer_key: str
    model: str
    model_digest: str | None  # manifest digest of version 0, None until it is published
    temperature: float
    eos_token_ids: tuple[int, ...]
    max_tokens: int  # of the longest lease
    max_prompt_tokens: int
    max_staleness: int
    lease_term_s: float
    precision_classes: tuple[str, ...]
    join: str = "open"  # what a new key is asked for: open, invite or work (protocol.joining)
    work_bits: int = 0
    turns: tuple[TurnRules, ...] = ()  # that leases name by their digest; none where all tasks take a single turn

    def to_json(self) -> str:
        values = asdict(self)
        if not self.turns:
            del values["turns"]
        return json.dumps(values, indent=1)


def _typed(name: str, value: Any, of: Any = RunTerms) -> Any:
    """The value of a field, of the type that its class declares. Raises TypeError."""
    declared = str(of.__dataclass_fields__[name].type)
    if declared.startswith("tuple") and not isinstance(value, list):
        raise TypeError(f"{name} must be a list")
    for item in value if declared.startswith("tuple") else [value]:
        if not isinstance(item, _TYPES[declared]) or isinstance(item, bool):
            raise TypeError(f"{name} must be of type {declared}, not {item!r:.40}")
    if declared == "tuple[TurnRules, ...]":
        return tuple(map(_turn_rules, value))
    return tuple(value) if isinstance(value, list) else value


def _turn_rules(values: dict[str, Any]) -> TurnRules:
    """Raises TypeError, KeyError or ValueError for rules that are none."""
    rules = TurnRules(**{name: _typed(name, values[name], TurnRules) for name in TurnRules.__dataclass_fields__})
    if not (
        0 < len(rules.stop_token_ids) <= STOP_TOKENS_MAX
        and min(rules.stop_token_ids) >= 0
        and 0 < rules.max_calls <= CALLS_MAX
        and 0 < rules.max_answer_tokens <= ANSWER_TOKENS_MAX
    ):
        raise ValueError("turns whose calls can't end, or are without bounds")
    return rules


def parse_terms(body: bytes, source: str) -> RunTerms:
    """Read the terms. Raises UserError, naming `source`, if they are not a coordinator's or of another protocol."""
    if len(body) > _TERMS_BYTES_MAX:
        raise UserError(f"{source} answered with more than {_TERMS_BYTES_MAX} bytes: this is no coordinator")
    try:
        values: dict[str, Any] = json.loads(body)
        # Fields with a default came later: a coordinator that does not name them is of before.
        named = [
            name for name, field in RunTerms.__dataclass_fields__.items() if name in values or field.default is MISSING
        ]
        terms = RunTerms(**{name: _typed(name, values[name]) for name in named})
        public_key(terms.coordinator_key)
        public_key(terms.trainer_key)
    except (ValueError, TypeError, KeyError, BadSignature) as error:
        raise UserError(f"{source} does not serve a run's terms ({error!r}): is it a coordinator's URL?") from error
    if not _RUN_ID.fullmatch(terms.run_id):  # it names a folder on the worker's disk
        raise UserError(f"{source} serves a run_id that is none: {terms.run_id!r:.80}")
    if not (
        math.isfinite(terms.lease_term_s)
        and terms.lease_term_s > 0
        and 0 < terms.temperature <= 10
        and min(terms.max_tokens, terms.max_prompt_tokens) >= 1
        and terms.max_staleness >= 0
        and terms.join in (OPEN, INVITE, WORK)
        and 0 <= terms.work_bits <= WORK_BITS_MAX
    ):
        raise UserError(
            f"{source} serves terms that nobody can keep (temperature, lengths, staleness, lease term or work)"
        )
    if not terms.protocol_min <= PROTOCOL_MAX or not terms.protocol_max >= PROTOCOL_MIN:
        raise UserError(
            f"{source} speaks protocol {terms.protocol_min} to {terms.protocol_max}, this program {PROTOCOL_MIN} to "
            f"{PROTOCOL_MAX}: update rollswarm on the older side"
        )
    return terms
