"""The command line: ``fxschedule``, also ``python -m schedule``.

Results go to the standard output, as tables or with ``--json`` as one JSON object; progress and errors go to the
standard error, with ``--json`` an error is an object ``{"error": …}`` on the standard output. Exit codes:

==== ==========================================================================================================
0    Done; what was asked is so.
1    Done, and the answer is no: a difference was found, a rule does not apply, nothing but plain torch runs here.
2    The command line is wrong: an unknown option, rule or module path, a report that could not be written.
3    There is no such model here: nothing is downloaded, and no remote code is run unasked.
4    The model is refused: it cannot be called, traced or rewritten as asked; the message says why.
130  Interrupted. Files are written whole or not at all.
==== ==========================================================================================================
"""

from schedule.cli.app import app, main

__all__ = ["app", "main"]
