"""Sharded modules: parameters, forwards, collectives, and what follows a shard."""
