"""Images that turn out to be unreadable: each named once, skipped up to a stated number, never silently."""

import logging

from piebridge.core.errors import UserError

NOTHING_READABLE = "none of the training images can be read; the reasons are above"
LOG = logging.getLogger(__name__)


class BadImages:
    """Call it with a BadImage: it is logged and kept in `found`; one more than `most` of them is a UserError.

    found: {path: reason}. known: those that were found before, as a list of (path, reason); they count. keep: called with the list of
    all that are found, so that a resumed run knows them too.
    """

    def __init__(self, most, known=(), keep=lambda found: None):
        self.most = most
        self.found = {str(path): reason for path, reason in known}
        self._keep = keep

    def __call__(self, error):
        if error.path in self.found:
            return
        self.found[error.path] = error.reason
        self._keep([list(entry) for entry in self.found.items()])
        LOG.warning("%s: cannot be read as an image (%s); skipped", error.path, error.reason)
        if len(self.found) > self.most:
            raise UserError(f"{len(self.found)} images cannot be read, more than loader.max_bad_files={self.most}; the last is "
                            f"{error.path} ({error.reason}); repair or remove them, or raise that number")
