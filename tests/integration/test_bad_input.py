"""What a person gets wrong gives one line that says what to do, exit status 2, and never a traceback."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import keyfile
from tests.network import Network
from tests.tiny_model import build_tiny_model


def _run(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=timeout_s)


def _one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """The error is one line that holds these words."""
    assert result.returncode == 2, (result.returncode, result.stderr)
    assert "Traceback" not in result.stdout + result.stderr
    last = result.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, (word, last)


@pytest.fixture
def network(tmp_path: Path) -> Network:
    """A run folder; nothing is started."""
    return Network(tmp_path / "run")


def test_a_url_that_is_none(tmp_path: Path) -> None:
    _one_line(
        _run("worker.main", "join", "--coordinator", "localhost:7448", "--home", str(tmp_path)),
        "http://",
        "localhost:7448",
    )


def test_a_url_that_is_no_coordinators(tmp_path: Path) -> None:
    import http.server
    import threading

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        result = _run("worker.main", "status", "--coordinator", url, "--home", str(tmp_path))
        _one_line(result, "no identity", "worker join")
        keyfile.load_or_create(tmp_path / "identity.key")
        _one_line(_run("worker.main", "status", "--coordinator", url, "--home", str(tmp_path)), url)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_coordinator_that_is_down_is_waited_for_and_said_so(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [sys.executable, "-m", "worker.main", "join", "--coordinator", url, "--home", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = ""
        while "trying again" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        assert "cannot reach" in said
        assert process.poll() is None
        assert not (tmp_path / "identity.key").exists(), "nobody answered whom it would be for"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_damaged_key_file(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_text("not a key")
    path.chmod(0o600)
    _one_line(_run("worker.main", "identity", "--home", str(tmp_path)), str(path), "damaged")


def test_a_key_file_that_others_can_read(tmp_path: Path) -> None:
    keyfile.load_or_create(tmp_path / "identity.key")
    (tmp_path / "identity.key").chmod(0o644)
    _one_line(_run("worker.main", "identity", "--home", str(tmp_path)), "chmod 600")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("max_staleness = 2", "max_staleness = -1", ("scheduling.max_staleness", "-1")),
        ("max_staleness = 2", "max_stalenes = 2", ("scheduling.max_stalenes",)),
        ("temperature = 1.0", "temperature = 1.0\ntop_p = 0.9", ("top_p", "refused")),
        ('kind = "tests.parity:Parity"', 'kind = "chess"', ("chess", "arithmetic")),
        ('path = "model"', 'path = "nowhere"', ("model.path", "nowhere", "config.json")),
        ("[run]", "[run", ("not valid TOML",)),
        ("trainer_key = ", "trainer_key = 'ed25519:12' #", ("run.trainer_key",)),
    ],
)
def test_a_run_file_with_a_mistake_names_the_field(
    network: Network, old: str, new: str, words: tuple[str, ...]
) -> None:
    text = network.config.read_text()
    assert old in text
    network.config.write_text(text.replace(old, new, 1))
    _one_line(_run("coordinator.main", "serve", "--config", str(network.config)), *words)


def test_no_run_file(tmp_path: Path) -> None:
    missing = str(tmp_path / "run.toml")
    for role in (("coordinator.main", "serve"), ("coordinator.main", "verify"), ("trainer.main", "run")):
        _one_line(_run(*role, "--config", missing), missing, "coordinator init")


@pytest.mark.parametrize("port", ["grpc", "http", "trainer"])
def test_a_port_in_use_is_named(network: Network, port: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", getattr(network.ports, port)))
        taken.listen()
        result = _run("coordinator.main", "serve", "--config", str(network.config))
    _one_line(result, f"server.{port}_port", "choose another")


def test_an_unknown_loss_and_advantage(network: Network) -> None:
    text = network.config.read_text()
    network.config.write_text(text + 'advantage = "best"\n')
    _one_line(_run("trainer.main", "run", "--config", str(network.config)), "advantage", "best")


def test_init_makes_a_folder_that_wants_calibration_and_is_never_overwritten(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    folder = tmp_path / "run"
    made = _run("coordinator.main", "init", str(folder), "--model", str(model))
    assert made.returncode == 0, made.stderr
    assert (folder / "trainer.key").stat().st_mode & 0o777 == 0o600
    _one_line(_run("coordinator.main", "serve", "--config", str(folder / "run.toml")), "coordinator calibrate")
    _one_line(_run("coordinator.main", "init", str(folder), "--model", str(model)), "exists")
    _one_line(_run("coordinator.main", "init", str(tmp_path / "other"), "--model", str(tmp_path)), "config.json")


def test_an_unreachable_database(network: Network) -> None:
    text = network.config.read_text()
    url = 'database = "postgresql+asyncpg://nobody:hidden@127.0.0.1:9/none"'
    network.config.write_text(text.replace(f'database = "{network.database}"', url))
    result = _run("coordinator.main", "serve", "--config", str(network.config))
    _one_line(result, "cannot use the database", "127.0.0.1")
    assert "hidden" not in result.stderr
