"""``python -m schedule``: the same as the command ``fxschedule``."""

from fxschedule.__main__ import main

main()
