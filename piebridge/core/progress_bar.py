"""The one way to a progress bar: seen on a terminal only, and not where the log is told to be quiet."""

import logging


def progress_bar(iterable=None, **options):
    """A tqdm bar with tqdm's `options` (total, desc, unit, initial), or around `iterable`.

    It appears after two seconds and leaves nothing behind. It is off where stderr is no terminal, and where the package's log is
    off for INFO (`piebridge -q`, or a program that never asked for the log). tqdm's own switch, TQDM_DISABLE, is too new to rely on.
    """
    from tqdm import tqdm

    is_wanted = logging.getLogger("piebridge").isEnabledFor(logging.INFO)
    return tqdm(iterable, delay=2, leave=False, disable=None if is_wanted else True, **options)
