"""A proxy set: a folder with an original and its proxies, what is shared stored once.

    original.safetensors    the original, a network file: level 0, bit for bit
    proxy_01.safetensors    what the original does not have of each proxy (core/proxy_file.py), dearest first
    order.safetensors       nested order: where each channel goes, so that each proxy's tensors are prefixes (core/shared_tensors.py)
    policy.safetensors      the policy network; predictor.safetensors: the predictor of the residual
    manifest.json           hashes, bytes, costs, alignment, latency by device (core/proxy_manifest.py)

The original's file is never reordered. A channel's place in nested order costs four bytes on disk; in memory the nested order is one
more copy of what is cut, whatever the number of proxies, or none with `is_reordered`.
"""

import contextlib
import functools
import glob
import logging
import os
import shutil
import uuid
from pathlib import Path

from piebridge.core import proxy_manifest
from piebridge.core.costs import network_costs
from piebridge.core.errors import UserError
from piebridge.core.files import PART_SUFFIX, expand_user, sync, write_text
from piebridge.core.network_file import load_network_file, save_network
from piebridge.core.order_file import read_order, write_order
from piebridge.core.packages import one_line
from piebridge.core.predictor_file import load_predictor, save_predictor
from piebridge.core.proxy_file import OnDemandProxy, Proxy, check_proxy, read_proxy_file, write_proxy_file
from piebridge.core.shared_tensors import SharedTensors, in_own_order

__all__ = ["Proxy", "ProxySet", "load_proxy_set", "write_proxy_set"]
LOG = logging.getLogger(__name__)
MOST_PROXIES = 999
MOST_OF_NAME = 60  # letters of a set's name in that of a folder that is being written


class ProxySet:
    """A loaded set. original: GraphNetwork (level 0). proxies: list of Proxy (levels 1, 2, ...), dearest first. policy: GraphNetwork or
    None. predictor: or None. manifest: dict. folder: Path. order: cuts, see `in_own_order`."""

    def __init__(self, folder, manifest, source, proxies, policy, predictor):
        self.folder, self.manifest, self.proxies, self.policy, self.predictor = folder, manifest, proxies, policy, predictor
        self.original, self.order, self.is_reordered = source.original, source.order, source.is_reordered

    def in_own_order(self, network):
        """A network tuned in this set's order -> in the order of the original's file, bit for bit; the network itself if it is so."""
        return in_own_order(network, self.order) if self.is_reordered else network

    def update_manifest(self, device, table):
        """Write the latency table (a JSON value) of a device (its name) into the manifest, in the place of an older one."""
        manifest = proxy_manifest.read_manifest(self.folder)  # another process may have added its own
        manifest["latency"][str(device)] = table
        write_text(self.folder / proxy_manifest.NAME, proxy_manifest.to_text(manifest))
        self.manifest = manifest


def load_proxy_set(folder, is_reordered=False, keeps_networks=True):
    """The ProxySet in a folder; every file is compared with its hash in the manifest, and no code from it is run.

    Networks are in eval mode. Parameters that a proxy has in common with the original are the same objects, cut ones are views where
    the set's order allows, buffers are copies. is_reordered: keep the original in nested order, which saves memory and changes its
    outputs by the rounding of sums; the proxies' cuts are then told of it. keeps_networks: where not, each proxy's network is read
    from its file whenever it is asked for, so that of the tensors that the original lacks only those in use are in memory. UserError
    names the file that is missing, damaged or swapped, or that says something impossible.
    """
    folder = expand_user(folder)
    manifest = proxy_manifest.read_manifest(folder)
    proxy_manifest.check_files(folder, manifest)
    original = load_network_file(folder / proxy_manifest.ORIGINAL)
    shapes = {key: tuple(tensor.shape) for key, tensor in original.state_dict().items()}
    order = read_order(folder / proxy_manifest.ORDER, shapes) if manifest.get("order") else {}
    source = SharedTensors(original, order, is_reordered, keeps_parts=keeps_networks)
    del original
    proxies = {}
    for entry in manifest["proxies"]:
        path = folder / entry["file"]
        read = functools.partial(read_proxy_file, path, source, manifest["original"]["sha256"], proxies)
        proxy = read()
        proxies[entry["file"]] = proxy if keeps_networks else OnDemandProxy.of(proxy, read)
        if proxy.name != entry.get("name"):
            raise UserError(f"{path}: holds the proxy {proxy.name!r} where {proxy_manifest.NAME} lists {entry.get('name')!r:.60}")
    policy = load_network_file(folder / proxy_manifest.POLICY) if manifest.get("policy") else None
    predictor = load_predictor(folder / proxy_manifest.PREDICTOR) if manifest.get("predictor") else None
    return ProxySet(folder, manifest, source, list(proxies.values()), policy, predictor)


def write_proxy_set(folder, original, proxies, facts=None, policy=None, predictor=None, order=None, overwrite=False):
    """Write a set into a folder, whole or not at all, for `load_proxy_set` to read.

    original: GraphNetwork. proxies: list of Proxy, dearest first. facts: JSON object for the manifest. policy: GraphNetwork or None.
    order: cuts of the original into nested order (`tensor_cuts` of `nested_order`), where the proxies' channels are in it. overwrite:
    replace a set that is there. UserError where there is one already, or a folder that is not only a set; nothing is touched then.
    """
    target = Path(os.path.realpath(str(expand_user(folder))))  # of a link, what it points to is replaced
    check_target(target, overwrite)
    _check_proxies(target, proxies)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.parent / f".{target.name[:MOST_OF_NAME]}.{uuid.uuid4().hex[:8]}{PART_SUFFIX}"
    part.mkdir()
    try:
        manifest = _write_files(part, original, proxies, facts or {}, policy, predictor, order)
        write_text(part / proxy_manifest.NAME, proxy_manifest.to_text(manifest))
        check_target(target, overwrite)  # forging takes long
        _move(part, target)
    finally:
        shutil.rmtree(str(part), ignore_errors=True)
    LOG.debug("wrote %d proxies to %s", len(proxies), target)


def remove_leftovers(folder):
    """Delete what killed writers of a set left beside it; nobody else may be writing it."""
    target = Path(os.path.realpath(str(expand_user(folder))))
    for part in target.parent.glob(f".{glob.escape(target.name[:MOST_OF_NAME])}.????????{PART_SUFFIX}"):
        shutil.rmtree(str(part), ignore_errors=True)


def _write_files(folder, original, proxies, facts, policy, predictor, order):
    """Write all but the manifest into a folder, and return that."""
    paths = {key: folder / name for key, name in proxy_manifest.SINGLE.items()}
    save_network(original, paths["original"])
    entry = proxy_manifest.file_entry(paths["original"], name=original.description["name"], fingerprint=original.fingerprint(),
                                      macs=_macs("the original", original, original.description["input_size"]))
    manifest = {"format": proxy_manifest.FORMAT, "version": proxy_manifest.VERSION, "original": entry, "proxies": [],
                "order": None, "policy": None, "predictor": None, "facts": facts, "latency": {}}
    written = {}
    for number, proxy in enumerate(proxies, start=1):
        path = folder / f"proxy_{number:02d}.safetensors"
        write_proxy_file(path, proxy, original, entry["sha256"], written)
        written[path.name] = proxy
        manifest["proxies"].append(proxy_manifest.file_entry(
            path, name=proxy.name, resolution=proxy.resolution, precision=proxy.precision,
            macs=_macs(f"proxy {proxy.name}", proxy.network, [3, proxy.resolution, proxy.resolution]), facts=proxy.facts))
    if order:
        write_order(paths["order"], order)
        manifest["order"] = proxy_manifest.file_entry(paths["order"])
    if policy is not None:
        save_network(policy, paths["policy"])
        manifest["policy"] = proxy_manifest.file_entry(paths["policy"])
    if predictor is not None:
        save_predictor(predictor, paths["predictor"])
        manifest["predictor"] = proxy_manifest.file_entry(paths["predictor"])
    return manifest


def _macs(what, network, size):
    """Counted by running it, so that what does not run is not written."""
    try:
        return network_costs(network, size)["macs"]
    except RuntimeError as error:
        raise UserError(f"{what}: does not run on images of {size[1]} x {size[2]} pixels ({one_line(error)[:200]})") from None


def _check_proxies(target, proxies):
    if len(proxies) > MOST_PROXIES:
        raise UserError(f"{target}: {len(proxies)} proxies, and a set holds {MOST_PROXIES} at most")
    names = [proxy.name for proxy in proxies]
    for proxy in proxies:
        check_proxy(target, proxy)
        if names.count(proxy.name) > 1:
            raise UserError(f"{target}: two proxies have the name {proxy.name!r}; each needs its own")


def check_target(target, overwrite):
    """UserError where no set may be written to a folder (Path): only one that is not there, an empty one, or, if asked, one that is a
    set and nothing else."""
    if not os.path.lexists(str(target)):
        return
    if not target.is_dir():
        raise UserError(f"{target}: is no folder; choose another name for the proxy set")
    names = sorted(path.name for path in target.iterdir())
    if not names:
        return
    if not proxy_manifest.is_set(target):
        raise UserError(f"{target}: is a folder with other things in it ({names[0]}); choose another for the proxy set")
    foreign = [name for name in names if not proxy_manifest.is_set_file(name)]
    if foreign:
        raise UserError(f"{target}: holds {foreign[0]} beside its proxy set; move it elsewhere, or choose another folder")
    if not overwrite:
        raise UserError(f"{target}: holds a proxy set already; choose another folder, or give overwrite=true to replace it")


def _move(part, target):
    """Give a finished folder its name. An older set steps aside first, and comes back if that fails."""
    aside = part.with_name(part.name + ".old")
    is_there = target.is_dir()
    if is_there:
        os.rename(str(target), str(aside))
    try:
        os.rename(str(part), str(target))
    except OSError:
        if is_there:
            os.rename(str(aside), str(target))
        raise
    with contextlib.suppress(OSError):  # some file systems refuse to sync a folder; the rename itself is still atomic
        sync(target.parent)
    if is_there:
        shutil.rmtree(str(aside), ignore_errors=True)
