"""What users call: schedules, and the functions that take a model or a schedule of it."""
