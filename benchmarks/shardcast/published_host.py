"""What a host of the published package's variant runs. Started by that package's own interpreter: imports nothing of ours.

The package's defaults hold, except that a relay looks for new versions every second (its default is every 30), as
workers do. Its workers and relays first fetch a `data1.bin` from each source, to know its speed; it is put there for them.
"""

import pathlib
import sys
import time

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
    path, seen = None, 0
    while path is None:  # it answers None also when the other relay doesn't know the version yet
        time.sleep(POLL_S)
        versions = client.list_available_versions()
        # Each question goes to a relay at random. A download that meets a relay without the version guesses the number
        # of shards, and may then never end, so the version must have been seen twice.
        seen = seen + 1 if versions else 0
        path = client.download_version(max(versions)) if seen > 1 else None
    print(f"done {time.monotonic()} {pathlib.Path(path).stat().st_size}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"origin": serve_origin, "relay": serve_relay, "worker": work}[sys.argv[1]](*sys.argv[2:])
