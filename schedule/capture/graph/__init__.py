"""What every part of a trace uses: its interface, symbolic numbers, signatures, the state of modules."""
