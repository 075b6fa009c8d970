"""The engine: a training step compiled before it runs, sparse, with its memory known beforehand (after PockEngine, MICRO'23).

For a workstation with a current torch; what it writes is small and runs elsewhere.
"""
