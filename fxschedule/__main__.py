"""The command ``fxschedule``, also ``python -m fxschedule``."""

from __future__ import annotations

import sys

from fxschedule.installation import problem


def main() -> None:
    """Run the command line interface; exit with 2 if another package of the name ``schedule`` is in the way."""
    if (why := problem()) is not None:
        print(f"fxschedule: {why}", file=sys.stderr)
        sys.exit(2)
    from schedule.cli import main as run

    run()


if __name__ == "__main__":
    main()
