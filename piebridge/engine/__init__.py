"""The engine: a training step compiled before it runs, sparse, with its memory known beforehand (after PockEngine, MICRO'23).

For a workstation with a current torch; what it writes is small and runs elsewhere. Importing this package imports nothing heavy.
"""

__all__ = ["compile", "read_program"]


def compile(module, loss="cross_entropy", optimizer="sgd", scheme=None, example=None, **settings):
    """A `StepProgram` that trains `module` as `scheme` says: `program(inputs, targets, rate=0.01)`, `program.load_into(module)`.

    See compiling.py; `piebridge.engine.compile(network, scheme="last 2 blocks", example=(images, labels))`.
    """
    from piebridge.engine.compiling import compile as run

    return run(module, loss, optimizer, scheme, example, **settings)


def read_program(path):
    """The `StepProgram` of a file that `program.write(path)` wrote."""
    from piebridge.engine.program import StepProgram

    return StepProgram.read(path)
