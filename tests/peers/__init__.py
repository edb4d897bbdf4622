"""Other projects' own tests, run on models that are scheduled."""
