"""The quick tests with other releases of torch, transformers and Python, each in an environment of its own."""
