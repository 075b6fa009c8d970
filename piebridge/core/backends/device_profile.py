"""What was measured on this device, kept for the next run: a JSON file in the user's cache folder.

A second run with the same network, sizes, versions and processor finds the first one's choice here, so that it repeats it and
measures nothing. A file that cannot be read is worth nothing and is replaced; a folder that cannot be written is not an error.
"""

import logging

from piebridge.core.errors import UserError
from piebridge.core.files import read_json, sha256_of_json, user_cache_folder, write_json

LOG = logging.getLogger(__name__)
FORMAT, VERSION = "piebridge-device-profile", 1
MOST_ENTRIES = 200


def profile_path():
    """Where the measurements are kept, see `user_cache_folder`."""
    return user_cache_folder() / "device_profile.json"


def recall(key):
    """The value that was remembered for `key` (a JSON value that says what was measured), or None."""
    entry = _entries(profile_path()).get(sha256_of_json(key))
    return entry["value"] if isinstance(entry, dict) and entry.get("key") == key and "value" in entry else None


def remember(key, value):
    """Keep `value` (JSON) for `key`; the oldest entries make room."""
    path = profile_path()
    try:
        entries = _entries(path)
        name = sha256_of_json(key)
        entries.pop(name, None)
        entries[name] = {"key": key, "value": value}
        kept = dict(list(entries.items())[-MOST_ENTRIES:])
        write_json(path, {"format": FORMAT, "version": VERSION, "entries": kept})
    except (OSError, UserError) as error:  # a folder that cannot be written, or a file in its place
        LOG.info("measurements are not kept for the next run: %s", error)


def _entries(path):
    content = read_json(path)
    if content is None and path.exists():
        LOG.warning("%s: not readable as JSON; measured again and replaced", path)
    is_ours = isinstance(content, dict) and content.get("format") == FORMAT and content.get("version") == VERSION
    entries = content.get("entries") if is_ours else None
    return entries if isinstance(entries, dict) else {}
