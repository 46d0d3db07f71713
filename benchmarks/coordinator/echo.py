"""The ceiling: a bare grpc.aio server that checks each submission's signature and sends the same bytes back.

It grants leases of the same size as well, made once: so a client's calls and bytes are those that it exchanges with a
coordinator. It stores nothing, decides nothing and signs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

import grpc

from protocol.rollout import SamplingParams
from protocol.signing import ROLLOUT, open_envelope
from protocol.wire import envelope_from_wire, sampling_to_wire
from protos.rollswarm.v1 import worker_pb2, worker_pb2_grpc


class EchoService(worker_pb2_grpc.WorkerServiceServicer):
    """Answers with what it was sent."""

    def __init__(self, leases: worker_pb2.AcquireLeasesResponse) -> None:
        self._leases = leases

    async def AcquireLeases(  # noqa: N802
        self, request: worker_pb2.AcquireLeasesRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.AcquireLeasesResponse:
        return self._leases

    async def SubmitRollout(  # noqa: N802
        self, request: worker_pb2.SubmitRolloutRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SubmitRolloutResponse:
        open_envelope(envelope_from_wire(request.rollout), ROLLOUT)
        return worker_pb2.SubmitRolloutResponse(receipt=request.rollout)


def leases(count: int, tokens: int) -> worker_pb2.AcquireLeasesResponse:
    """So many leases, in size as a coordinator grants them."""
    return worker_pb2.AcquireLeasesResponse(
        leases=[
            worker_pb2.Lease(
                lease_id=f"{number:032x}",
                sample_id=f"g10000-{number}",
                prompt_token_ids=range(1, 32),
                sampling=sampling_to_wire(SamplingParams(1.0, tokens, (2,))),
                seed=2**62 + number,
                min_version=0,
                deadline_ms=300_000,
            )
            for number in range(count)
        ]
    )


async def serve(count: int, tokens: int) -> None:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(EchoService(leases(count, tokens)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(f"ready grpc=127.0.0.1:{port}", flush=True)
    await stop.wait()
    await server.stop(1.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordinator.echo")
    parser.add_argument("--leases", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()
    asyncio.run(serve(options.leases, options.tokens))
