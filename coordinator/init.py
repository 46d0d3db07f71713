"""`coordinator init`: a run folder that works as it is, with the fields that one changes first written out."""

from __future__ import annotations

import datetime as dt
import json
import re
from pathlib import Path

from coordinator import certificates, trainer_token
from coordinator.config import RunFile, check_relay, load_run_file, model_shape
from protocol import keyfile
from protocol.errors import UserError
from recipes import recipe_text

_TEMPLATE = """\
# A Rollswarm run. Relative paths are relative to this file. Fields are described in docs/run-file.md.
{about}
[run]
name = {name}
database = "sqlite+aiosqlite:///run.db"        # or postgresql+asyncpg://user:password@host/name
trainer_key = {trainer_key}

[model]
name = {model_name}
path = {model}

[sampling]
temperature = 1.0
eos_token_ids = {eos}

[scheduling]
{scheduling}
lease_term_s = 60.0
group_deadline_s = 300.0
newcomer_share = 0.5
probation_rollouts = 32

[[environments]]
name = "arithmetic"
weight = 1.0
max_tokens = 8

[verification]
audit_fraction = 1.0
max_strikes = 3
thresholds_file = "calibration/thresholds.toml"  # `coordinator calibrate` writes it

[server]
{server}

[shardcast]
relays = {relays}

[trainer]
{trainer}
versions = 100
"""

# What recipes are about is left to them: without one, these are the defaults.
_NO_RECIPE = """\
[scheduling]
# groups_per_batch = 8
# group_size = 16
# min_group = 2
# max_staleness = 2

[trainer]
# loss = "ipo"
# advantage = "dr_grpo"
# learning_rate = 1e-6
"""

_LOOPBACK = """\
host = "127.0.0.1"            # this machine alone; `coordinator certificate` says what to write for others
grpc_port = 7447
http_port = 7448
trainer_port = 7449
advertise_host = "127.0.0.1"\
"""

_PUBLIC = """\
host = "0.0.0.0"
grpc_port = 7447
http_port = 7448
trainer_port = 7449           # loopback, unless trainer_host says otherwise
advertise_host = {host}
certificate = "tls/server.pem"      # `coordinator certificate` renews it
certificate_key = "tls/server.key"
ca = "tls/ca.pem"             # its digest is in the URL that workers join by\
"""


def init_run(
    folder: Path,
    *,
    name: str,
    model: Path,
    relays: tuple[str, ...],
    hosts: tuple[str, ...] = (),
    recipe: str | None = None,
    now: dt.datetime | None = None,
) -> Path:
    """Write run.toml, coordinator.key, trainer.key and trainer.token into `folder`; returns the run file's path.

    `hosts`: names or addresses by which workers reach this coordinator, the one that they are told first; then an
    authority and a certificate are made as well. Without any it listens on loopback, in plaintext. `recipe`: the name of the
    one whose fields are written out.

    Raises UserError if a run file is there already, the model folder can't be used, a relay's URL is none, or there is no
    such recipe.
    """
    path = folder / "run.toml"
    if path.exists():
        raise UserError(f"{path} exists: choose another folder, or edit it")
    model_shape(model)
    _check_relays(relays)
    chosen = _sections(_NO_RECIPE if recipe is None else recipe_text(recipe))
    folder.mkdir(parents=True, exist_ok=True)
    if hosts:
        certificates.write(folder / "tls", name, hosts, now or dt.datetime.now(dt.UTC))
    keyfile.load_or_create(folder / "coordinator.key")
    trainer, _ = keyfile.load_or_create(folder / "trainer.key")
    trainer_token.load_or_create(folder / "trainer.token")
    path.write_text(
        _TEMPLATE.format(
            name=json.dumps(name),
            trainer_key=json.dumps(trainer.key_id),
            model_name=json.dumps(model.resolve().name),
            model=json.dumps(str(model.resolve())),
            eos=json.dumps(_eos_token_ids(model)),
            server=_PUBLIC.format(host=json.dumps(hosts[0])) if hosts else _LOOPBACK,
            relays=json.dumps(list(relays or ("http://127.0.0.1:8601",))),
            about="" if recipe is None else f"# Its recipe is {recipe}:\n{chosen['']}\n",
            scheduling=chosen["scheduling"],
            trainer=chosen["trainer"],
        )
    )
    load_run_file(path)
    return path


def _check_relays(relays: tuple[str, ...]) -> None:
    try:
        for url in relays:
            check_relay(url)
    except ValueError as error:
        raise UserError(f"--relay: {error}") from None


def _sections(recipe: str) -> dict[str, str]:
    """The lines of each table of a recipe; under "" what stands above the first."""
    above, *parts = re.split(r"^\[(\w+)\]\n", recipe, flags=re.MULTILINE)
    return {"": above.rstrip()} | {name: body.rstrip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


def _eos_token_ids(model: Path) -> list[int]:
    """What the model's config calls end of sequence; 0 if it says nothing."""
    eos = json.loads((model / "config.json").read_text()).get("eos_token_id", 0)
    return [int(token) for token in (eos if isinstance(eos, list) else [eos])]


def renew_certificate(run_file: RunFile, config: Path, names: tuple[str, ...], now: dt.datetime) -> list[str]:
    """Renew the certificate of a run's own authority, or make the first one; what to tell the operator.

    Raises UserError if the run file names certificates from elsewhere.
    """
    server, folder = run_file.server, config.resolve().parent / "tls"
    if server.certificate is not None and server.certificate.resolve() != folder / certificates.SERVER_FILES[0]:
        raise UserError(
            f"the run file names {server.certificate}, which is not of this run's own authority: renew it where it came from"
        )
    before = folder / certificates.SERVER_FILES[0]
    if not names and before.exists():
        names = certificates.about(before.read_bytes()).names
    about = certificates.write(folder, run_file.run.name, names or (server.advertise_host,), now)
    lines = [f"{before}: for {', '.join(about.names)}, valid until {about.not_after:%Y-%m-%d}"]
    pin = certificates.pin_of((folder / "ca.pem").read_bytes())
    lines.append(f"workers join by https://{about.names[0]}:{server.http_port}#sha256={pin}")
    if server.certificate is None:
        lines.append(
            'now set in [server]: certificate = "tls/server.pem", certificate_key = "tls/server.key", ca = "tls/ca.pem", '
            f'host = "0.0.0.0", advertise_host = "{about.names[0]}"'
        )
    return lines
