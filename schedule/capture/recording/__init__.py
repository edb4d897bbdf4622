"""The calls of all submodules in one run, and the structure of arguments and results."""
