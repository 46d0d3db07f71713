"""What can go wrong with a delta, and the words that metrics and reports use for it."""

from __future__ import annotations

from enum import StrEnum

from protocol.errors import OurFault, SourceFault


class InvalidDelta(SourceFault):
    """A blob that breaks the format, or does not fit its base or its version. Nothing of it was used."""


class NotHereYetError(SourceFault):
    """Bytes of a blob that is still on its way: what needs them is made later."""


class BaseUnreadable(OurFault):
    """The base's files here can't be read, or are shorter than its manifest says."""


class NotTheBaseError(OurFault):
    """What was offered as base is another version, or its bytes are not what its manifest says. Nothing was changed."""


class FallbackReason(StrEnum):
    """Why a version that has a delta, or a packed form, was fetched in full after all."""

    BLOB_ABSENT = "blob_absent"  # no source gave the blob's shards
    BLOB_WRONG = "blob_wrong"  # its bytes are those that were signed, and break the format
    BASE_UNREADABLE = "base_unreadable"  # the base's files here are gone or too short
    RESULT_DIFFERS = "result_differs"  # shards came out wrong: the base's bytes on this disk are damaged
    NO_ROOM = "no_room"  # the disk here has no room for the packed form beside the files
