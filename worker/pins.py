"""The keys of each coordinator, pinned at the first visit: a run can't change them behind a worker's back."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from protocol.errors import UserError
from protocol.terms import RunTerms


def check_pins(folder: Path, url: str, terms: RunTerms) -> bool:
    """Pin the keys behind `url`, or compare with those pinned; True if they were pinned now.

    Raises UserError if they changed.
    """
    path = folder / f"{sha256(url.rstrip('/').encode()).hexdigest()[:16]}.json"
    keys = {"url": url, "coordinator_key": terms.coordinator_key, "trainer_key": terms.trainer_key}
    try:
        pinned = dict(json.loads(path.read_text()))
    except FileNotFoundError:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps(keys, indent=1) + "\n")
        return True
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"the pinned keys in {path} can't be read ({error}): delete the file to pin them anew"
        ) from error
    for name in ("coordinator_key", "trainer_key"):
        if pinned.get(name) != keys[name]:
            raise UserError(
                f"{url} shows another {name.replace('_', ' ')} than at the first visit: someone may stand between. If the "
                f"operator says that the run was set up anew, delete {path}"
            )
    return False
