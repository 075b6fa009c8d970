"""The three ways in which a command ends other than well."""


class UserError(Exception):
    """Bad usage or bad input: one line that names the file or key, the value and the cure. Exit status 2."""


class RunFailed(Exception):
    """A run that failed by itself, on good input (a loss that is not a number, a full disk). Exit status 1."""


class Cancelled(Exception):
    """The run was interrupted; everything needed to resume it has been saved. Exit status 130."""
