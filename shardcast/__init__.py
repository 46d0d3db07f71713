"""SHARDCAST: new weights reach every worker, whoever carries them. An origin, relays in a tree, and a client."""
