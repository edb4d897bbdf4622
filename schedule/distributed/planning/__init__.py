"""Finding a tensor-parallel plan in traced graphs alone."""
