"""Makes what `docker compose up` needs: run/ (run file, keys, certificates, secrets) and .env. Standard library alone.

    sudo python3 setup.py --host run.example.org --model /srv/models/SmolLM2-135M-Instruct

`coordinator init` runs in the coordinator's image, which is built first; `--coordinator COMMAND` runs it without containers.
Nothing that exists is overwritten: keys and passwords are made once.
"""

import argparse
import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
IMAGE = "rollswarm-coordinator:local"
USER = 10001  # of the images
DATABASE = "postgresql+asyncpg://rollswarm@postgres:5432/rollswarm"  # its password is in run/secrets/pgpass


def settings(device: str) -> dict[str, dict[str, str]]:
    """What the run file says within the containers of docker-compose.yml, by section."""
    return {
        "run": {"database": DATABASE},
        "model": {"path": "/model"},
        "server": {"host": "0.0.0.0"},
        "shardcast": {"sources": ["http://origin:8600"]},
        "trainer": {
            "coordinator": "127.0.0.1:7449",  # they share a network namespace
            "origin": "http://origin:8600",
            "origin_data": "/weights",
            "checkpoints": "/checkpoints",
            "evaluations": "/checkpoints/evaluations",  # a folder that the trainer may write
            "tensorboard": "/checkpoints/tensorboard",
            "device": device,
        },
    }


def with_settings(text: str, values: dict[str, dict[str, object]]) -> str:
    """The run file with these fields set; a field that is not there is added at the top of its section."""
    for section, fields in values.items():
        head = re.search(rf"^\[{re.escape(section)}\]\n", text, re.MULTILINE)
        if head is None:
            text = f"{text.rstrip()}\n\n[{section}]\n"
            head = re.search(rf"^\[{re.escape(section)}\]\n", text, re.MULTILINE)
        body, rest = _split(text[head.end() :])
        for name, value in fields.items():
            line = f"{name} = {json.dumps(value)}"  # strings and lists of strings read the same in JSON and in TOML
            pattern = rf"^{re.escape(name)} *=.*$"
            if re.search(pattern, body, re.MULTILINE):
                body = re.sub(pattern, lambda _, line=line: line, body, count=1, flags=re.MULTILINE)
            else:
                body = f"{line}\n{body}"
        text = text[: head.end()] + body + rest
    tomllib.loads(text)
    return text


def _split(text: str) -> tuple[str, str]:
    """The rest of a section, and what follows it."""
    following = re.search(r"^\[", text, re.MULTILINE)
    return (text, "") if following is None else (text[: following.start()], text[following.start() :])


def write_secrets(folder: Path) -> None:
    """Passwords, each made once. The folder is closed to others; a file is readable by the service that it is mounted in."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for name in ("postgres_password", "grafana_password"):
        if not (folder / name).exists():
            (folder / name).write_text(secrets.token_urlsafe(32))
        (folder / name).chmod(0o444)
    password = (folder / "postgres_password").read_text()
    (folder / "pgpass").write_text(f"*:*:rollswarm:rollswarm:{password}\n")
    (folder / "pgpass").chmod(0o600)


def environment(model: Path, trainer_key: str, device: str) -> str:
    """What docker-compose.yml takes from .env."""
    profile = "gpu" if device == "cuda" else "cpu"
    return f"COMPOSE_PROFILES={profile}\nMODEL_DIR={model}\nTRAINER_KEY={trainer_key}\n"


def init_command(options: argparse.Namespace, run: Path) -> list[str]:
    """The command that makes run.toml, the keys and the certificate."""
    folder, model = (run, options.model) if options.coordinator else ("/data", "/model")
    command = ["init", str(folder), "--name", options.name, "--model", str(model)]
    for host in (options.host, "coordinator", "localhost"):  # how workers, relays and health checks call it
        command += ["--advertise-host", host]
    command += ["--relay", options.relay or f"http://{options.host}:8601"]
    if options.recipe:
        command += ["--recipe", options.recipe]
    if options.coordinator:
        return [*shlex.split(options.coordinator), *command]
    mounts = ["-v", f"{run}:/data", "-v", f"{options.model}:/model:ro"]
    return ["docker", "run", "--rm", "--user", "0:0", *mounts, IMAGE, *command]


def give_to_containers(run: Path) -> None:
    """Let the images' user read keys and the run file; keys stay closed to everyone else, the authority is public."""
    for path in (run, *run.rglob("*")):
        os.chown(path, USER, USER)
    (run / "tls" / "ca.pem").chmod(0o644)


def unreadable(model: Path) -> Path | None:
    """A part of the model folder that only its owner may read, None if there is none: safetensors writes such files."""
    for path in (model, *sorted(model.rglob("*"))):
        if path.stat().st_uid != USER and path.stat().st_mode & 0o004 == 0:
            return path
    return None


def main() -> int:
    """Returns an exit status; says what to do next."""
    parser = argparse.ArgumentParser(description="Make run/ and .env for docker-compose.yml.")
    parser.add_argument("--host", required=True, help="Name or address by which workers reach this machine.")
    parser.add_argument("--model", required=True, type=lambda text: Path(text).resolve(), help="Hugging Face folder.")
    parser.add_argument("--name", default="run", help="What the run is called.")
    parser.add_argument(
        "--relay", help="URL of the first relay, as workers reach it; that of this machine if not given."
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="Where trainer and verifier compute.")
    parser.add_argument("--recipe", help="Objective and schedule written into run.toml: see recipes/README.md.")
    parser.add_argument("--coordinator", help="Command that runs `coordinator` here, instead of in a container.")
    parser.add_argument("--folder", type=Path, default=HERE, help="Where run/ and .env are written.")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        print(f"setup: {options.model} has no config.json: it must be a Hugging Face model folder", file=sys.stderr)
        return 2
    if closed := unreadable(options.model):
        print(f"setup: the containers' user can't read {closed}: `chmod -R a+rX {options.model}`", file=sys.stderr)
        return 2
    run = options.folder.resolve() / "run"
    if (run / "run.toml").exists():
        print(f"setup: {run / 'run.toml'} exists: edit it, or move the folder away", file=sys.stderr)
        return 2
    run.mkdir(mode=0o700, exist_ok=True)
    if not options.coordinator:
        subprocess.run(["docker", "build", "-t", IMAGE, "--target", "coordinator", str(HERE.parent)], check=True)
    subprocess.run(init_command(options, run), check=True)
    (run / "run.toml").write_text(with_settings((run / "run.toml").read_text(), settings(options.device)))
    (run / "calibration").mkdir(exist_ok=True)
    write_secrets(run / "secrets")
    trainer_key = tomllib.loads((run / "run.toml").read_text())["run"]["trainer_key"]
    (options.folder / ".env").write_text(environment(options.model, trainer_key, options.device))
    if os.geteuid() == 0:
        give_to_containers(run)
    else:
        print(f"setup: now `sudo chown -R {USER}:{USER} {run}`: the containers' user must read it", file=sys.stderr)
    print(f"wrote {run} (keep a copy: it holds the keys) and .env; next: calibrate, then `docker compose up -d`")
    return 0


if __name__ == "__main__":
    sys.exit(main())
