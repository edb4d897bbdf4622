"""Execution of scheduled modules: dispatch on guards, with the original forward as fallback."""

from schedule.runtime.scheduled import FallbackWarning, ScheduledState, state_of

__all__ = ["FallbackWarning", "ScheduledState", "state_of"]
