"""All that this project uses of torch's private modules: a release of torch has one folder to check."""
