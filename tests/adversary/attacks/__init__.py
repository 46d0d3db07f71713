"""Cheats, small classes by what they lie about, and the engine that commits them.

cheat      the hooks of a cheat, all honest
weights    another model, noise, rounding, an old version
requests   another prompt, seed or temperature; best of n
choices    another rule for choosing tokens
tokens     altered after generating
prefilled  any of those, with flawless proofs by the right model
claims     lying about an honest generation; hostile proofs
registry   all of them, by name
"""

from tests.adversary.attacks.cheat import Cheat
from tests.adversary.attacks.engine import CheatingEngine
from tests.adversary.attacks.registry import Attack, make_cheat

__all__ = ["Attack", "Cheat", "CheatingEngine", "make_cheat"]
