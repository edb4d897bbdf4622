"""Private names of torch in use: a new release of torch has one folder to check."""
