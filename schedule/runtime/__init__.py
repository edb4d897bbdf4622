"""How a scheduled module runs: dispatch on guards, and the original forward where none holds."""

from schedule.runtime.scheduled import FallbackWarning, ScheduledState, state_of

__all__ = ["FallbackWarning", "ScheduledState", "state_of"]
