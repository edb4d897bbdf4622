"""A forward as instrumented code: each read from outside becomes a guard, each write is followed or refused."""
