"""``python -m schedule``: the same as the command ``fxschedule``."""

from schedule.cli import main

main()
