"""Scripts behind each speed claim; each prints a table and writes JSON."""
