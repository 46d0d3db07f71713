"""Policy versions as announced by the trainer. A number names one digest for ever."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from coordinator.store import many
from coordinator.store.tables import batches, groups, leases, policy_versions, rollouts
from protocol.errors import UserError
from protocol.policy import PolicyVersion
from protocol.signing import SignedEnvelope

_NUMBER_MAX = 2**63 - 1


async def head(connection: AsyncConnection) -> PolicyVersion | None:
    """The newest version that was not withdrawn."""
    row = (
        await connection.execute(
            select(policy_versions.c.version, policy_versions.c.manifest_digest)
            .where(policy_versions.c.withdrawn.is_(False))
            .order_by(policy_versions.c.version.desc())
            .limit(1)
        )
    ).first()
    return None if row is None else PolicyVersion(row.version, row.manifest_digest)


async def digests(connection: AsyncConnection, oldest: int = 0) -> dict[int, str]:
    """Manifest digest of every version from `oldest` on that was not withdrawn."""
    rows = await connection.execute(
        select(policy_versions.c.version, policy_versions.c.manifest_digest).where(
            policy_versions.c.version >= oldest, policy_versions.c.withdrawn.is_(False)
        )
    )
    return {row.version: row.manifest_digest for row in rows}


@dataclass(frozen=True, slots=True)
class Named:
    """What is known of some versions: manifest digests of those that count, those that were withdrawn, and the head's
    number (0 if there is none)."""

    digests: dict[int, str]
    withdrawn: frozenset[int]
    head: int


async def named(connection: AsyncConnection, numbers: Iterable[int]) -> Named:
    """By one question. Numbers that no database can hold are unknown."""
    possible = [number for number in set(numbers) if 0 <= number <= _NUMBER_MAX]
    rows = list(await _NAMED.execute(connection, possible))
    digests = {row.version: row.manifest_digest for row in rows if not row.withdrawn}
    return Named(digests, frozenset(row.version for row in rows if row.withdrawn), max(digests, default=0))


NEWEST = select(func.max(policy_versions.c.version)).where(policy_versions.c.withdrawn.is_(False))
_NAMED = many.About(
    lambda mine: select(
        policy_versions.c.version, policy_versions.c.manifest_digest, policy_versions.c.withdrawn
    ).where(mine | (policy_versions.c.version == NEWEST.scalar_subquery())),
    policy_versions.c.version,
)


async def announce(
    connection: AsyncConnection, *, version: int, digest: str, envelope: SignedEnvelope, at: float
) -> bool:
    """Record a version; False if it was known with this very digest.

    Raises UserError for another digest under a known number, a withdrawn number, or a number that leaves a gap.
    """
    known = (
        await connection.execute(
            select(policy_versions.c.manifest_digest, policy_versions.c.withdrawn).where(
                policy_versions.c.version == version
            )
        )
    ).first()
    if known is not None and known.withdrawn:
        raise UserError(f"version {version} was withdrawn: `trainer rollback` goes back to an earlier checkpoint")
    if known is not None and known.manifest_digest == digest:
        return False
    if known is not None:
        raise UserError(
            f"version {version} is {known.manifest_digest[:19]}… for ever; the trainer must publish the next number"
        )
    newest = (await connection.execute(select(func.max(policy_versions.c.version)))).scalar()
    expected = 0 if newest is None else newest + 1
    if version != expected:
        raise UserError(f"the next policy version is {expected}, not {version}")
    await connection.execute(
        policy_versions.insert().values(
            version=version,
            manifest_digest=digest,
            payload=envelope.payload,
            key_id=envelope.key_id,
            signature=envelope.signature,
            announced_at=at,
            withdrawn=False,
        )
    )
    return True


async def withdraw(connection: AsyncConnection, after: int) -> list[int]:
    """Mark every version after `after` as withdrawn; those that were not yet, in order."""
    chosen = (policy_versions.c.version > after, policy_versions.c.withdrawn.is_(False))
    rows = await connection.execute(select(policy_versions.c.version).where(*chosen).order_by("version"))
    numbers = [row.version for row in rows]
    await connection.execute(update(policy_versions).where(*chosen).values(withdrawn=True))
    return numbers


async def required(connection: AsyncConnection) -> list[int]:
    """Every version that a live lease, an unresolved rollout or an unacknowledged batch refers to, and the head.

    The origin must not delete these.
    """
    newest = await head(connection)
    if newest is None:
        return []
    unresolved = rollouts.c.state.in_(("pending", "verifying"))
    unacknowledged = (
        select(rollouts.c.oldest_version)
        .join(groups, groups.c.group_id == rollouts.c.group_id)
        .join(batches, batches.c.batch == groups.c.batch)
        .where(batches.c.acknowledged_at.is_(None), rollouts.c.state == "served")
    )
    oldest = [newest.version]
    for statement in (
        select(func.min(leases.c.min_version)).where(leases.c.state == "live"),
        select(func.min(rollouts.c.oldest_version)).where(unresolved),
        select(func.min(unacknowledged.subquery().c.oldest_version)),
    ):
        value = (await connection.execute(statement)).scalar()
        if value is not None:
            oldest.append(value)
    rows = await connection.execute(
        select(policy_versions.c.version).where(policy_versions.c.version >= min(oldest)).order_by("version")
    )
    return [row.version for row in rows]
