"""`piebridge forge`: make a proxy set, show a network or a set, or profile a set on this device."""

import sys

from piebridge.core.errors import UserError
from piebridge.core.files import expand_user


def run(arguments):
    """The text to print."""
    if sys.version_info < (3, 10):
        raise UserError(f"forge: works on a workstation with Python 3.10 or newer (this is {sys.version.split()[0]})")
    if arguments.size is not None and arguments.size < 1:
        raise UserError(f"--size {arguments.size}: pixels of a square image, at least 1")
    if arguments.profile:
        return _profile(arguments)
    if arguments.show:
        return _show(arguments)
    return _make(arguments)


def _show(arguments):
    from piebridge.core.proxy_manifest import NAME, ORIGINAL

    folder = expand_user(arguments.network)
    if (folder / NAME).exists() or (folder / ORIGINAL).exists():  # whatever else is wrong with it
        from piebridge.forge.set_facts import read_facts
        from piebridge.forge.show_set import render_set

        return render_set(read_facts(folder))
    from piebridge.forge.show import render
    from piebridge.forge.structure import structure_of

    return render(structure_of(arguments.network, arguments.size))


def _profile(arguments):
    from piebridge.forge_settings import forge_settings

    settings = forge_settings(arguments.words)
    from piebridge.forge.profiling import profile_set

    return profile_set(expand_user(arguments.network), settings.profile_seconds, [int(size) for size in settings.batch_sizes])


def _make(arguments):
    for option, value in (("--images", arguments.images), ("--out", arguments.out)):
        if value is None:
            raise UserError(f"forge {arguments.network}: give {option} DIR (or --show to see its structure, --profile to measure a set)")
    from piebridge.forge_settings import forge_settings

    settings = forge_settings(arguments.words)  # what is wrong with them is said before torch is imported
    from piebridge.core.proxy_manifest import read_manifest
    from piebridge.forge.build import forge
    from piebridge.forge.profiling import profile_set
    from piebridge.forge.show_set import render_set

    folder = forge(arguments.network, expand_user(arguments.images), expand_user(arguments.out), settings)
    used = read_manifest(folder)["facts"]["backends"]  # --profile measures the others as well
    profile = profile_set(folder, settings.profile_seconds, batch_sizes=(1, 4), backends=used)
    return "\n\n".join([render_set(read_manifest(folder)), profile, f"proxy set  {folder}"])
