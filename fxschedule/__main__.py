"""The command ``fxschedule``, also ``python -m fxschedule``."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line interface.

    Exit with 2 if another package of the name ``schedule`` is in the way, and with 130 if interrupted.
    """
    try:
        _run()
    except (KeyboardInterrupt, SystemExit) as stopped:
        if isinstance(stopped, SystemExit) and stopped.code != INTERRUPTED:
            raise
        print("fxschedule: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _run() -> None:
    from fxschedule.installation import problem

    if (why := problem()) is not None:
        print(f"fxschedule: {why}", file=sys.stderr)
        sys.exit(2)
    from fxschedule.cli import main

    main()


if __name__ == "__main__":
    main()
