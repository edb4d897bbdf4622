"""Public entry points: schedules, and the functions on a model or its schedule."""
