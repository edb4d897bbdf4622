"""Command line interface: ``fxschedule``, also ``python -m schedule``.

Results are written to the standard output, as tables or with ``--json`` as one JSON object. Progress and errors are
written to the standard error. With ``--json``, an error is an object ``{"error": …}`` on the standard output.

Exit codes:

==== ==========================================================================================================
0    Done, with a positive result.
1    Done, with a negative result: a difference was found, a rule does not apply, only plain torch runs here.
2    The command line is wrong: an unknown option, rule or module path, a report that could not be written.
3    There is no such model here. Nothing is downloaded, and no remote code is run without permission.
4    The model is refused: it cannot be called, traced or rewritten as requested; the message says why.
130  Interrupted. Files are written whole or not at all.
==== ==========================================================================================================
"""

from fxschedule.cli.app import app, main

__all__ = ["app", "main"]
