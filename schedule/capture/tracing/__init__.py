"""FX tracing with example values: from a module's forward to a graph with guards."""
