"""The modules of a model as nodes: their graphs, the matches in them, and the history of edits."""
