"""What a host of the published package's variant runs. Started by that package's own interpreter: imports nothing of ours.

The package's defaults hold, except that a relay looks for new versions every second (its default is every 30), as
workers do. Its workers and relays first fetch a `data1.bin` from each source, to know its speed; it is put there for them.
"""

import pathlib
import sys
import time
import urllib.request

import shardcast

POLL_S = 1
PORT = 8000


def serve_origin(data: str) -> None:
    """Serve; for each line on standard input broadcast the file it names, and say when that was out."""
    origin = shardcast.OriginServer(data, PORT)
    print("ready", flush=True)
    for line in sys.stdin:
        begin = time.monotonic()
        origin.broadcast(line.strip())
        end = time.monotonic()
        print(f"announced {end} {end - begin}", flush=True)


def serve_relay(data: str, *upstream: str) -> None:
    """Pass versions on until ended."""
    relay = shardcast.MiddleNode(list(upstream), data, PORT, check_interval=POLL_S)
    print("ready", flush=True)
    relay.monitor_thread.join()


def work(data: str, *servers: str) -> None:
    """Wait for a version, fetch it, and say when it was whole and checked."""
    client = shardcast.ClientNode(list(servers), data)
    print("ready", flush=True)
    path = None
    while path is None:
        time.sleep(POLL_S)
        # Each of the package's questions goes to a server at random, and a download that meets one without the version
        # guesses the number of shards and may never end: so all must list it.
        versions = client.list_available_versions()
        if versions and all(lists_versions(server) for server in servers):
            path = client.download_version(max(versions))
    print(f"done {time.monotonic()} {pathlib.Path(path).stat().st_size}", flush=True)
    sys.stdin.read()


def lists_versions(server: str) -> bool:
    """Whether a server's list of versions names any."""
    try:
        with urllib.request.urlopen(f"{server}/distribution.txt", timeout=5) as answer:
            return b":" in answer.read()
    except OSError:
        return False


if __name__ == "__main__":
    {"origin": serve_origin, "relay": serve_relay, "worker": work}[sys.argv[1]](*sys.argv[2:])
