"""A BitTorrent peer that means no good: it claims to have everything, and sends rubbish, nothing, or the right bytes slowly."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_HANDSHAKE = 68
_BITFIELD, _UNCHOKE, _REQUEST, _PIECE = 5, 1, 6, 7


@dataclass
class HostilePeer:
    """Counts who came and what was asked of it."""

    pieces: int
    answers: bool  # rubbish to every request, or silence
    data: bytes = b""  # all pieces in a row: what it sends instead of rubbish, a block each `every_s`
    piece_bytes: int = 0
    every_s: float = 0.0
    sent: int = 0  # bytes
    greeted: int = 0
    asked: int = 0
    asked_at_all: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        tasks: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs = await reader.readexactly(_HANDSHAKE)
            self.greeted += 1
            writer.write(theirs[:20] + bytes(8) + theirs[28:48] + b"-XX0000-" + bytes(12))
            bits = bytearray(-(-self.pieces // 8))
            for piece in range(self.pieces):
                bits[piece // 8] |= 0x80 >> piece % 8
            self._say(writer, _BITFIELD, bytes(bits))
            self._say(writer, _UNCHOKE, b"")
            while True:
                (length,) = struct.unpack(">I", await reader.readexactly(4))
                message = await reader.readexactly(length)
                if message[:1] == bytes([_REQUEST]):
                    await asyncio.sleep(self.every_s)
                    self._on_request(writer, *struct.unpack(">III", message[1:]))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _on_request(self, writer: asyncio.StreamWriter, piece: int, begin: int, length: int) -> None:
        self.asked += 1
        self.asked_at_all.set()
        if self.answers:
            at = piece * self.piece_bytes + begin
            block = self.data[at : at + length] if self.data else b"\xee" * length
            self._say(writer, _PIECE, struct.pack(">II", piece, begin) + block)
            self.sent += len(block)

    def _say(self, writer: asyncio.StreamWriter, kind: int, body: bytes) -> None:
        writer.write(struct.pack(">IB", 1 + len(body), kind) + body)
