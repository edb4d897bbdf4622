"""Value-carrying FX tracing: from a module's forward to a graph with guards."""
