"""Classify images with the tuned network of a run."""

import logging
import os
from collections import Counter, namedtuple

import torch

from piebridge.core.errors import UserError
from piebridge.core.files import expand_user
from piebridge.core.images import IMAGE_EXTENSIONS, MAX_MEGAPIXELS, BadImage, load_image
from piebridge.core.layouts import images_below
from piebridge.core.network_file import load_network_file
from piebridge.core.progress_bar import progress_bar
from piebridge.core.run_folder import RunFolder
from piebridge.core.transforms import Transform

LOG = logging.getLogger(__name__)
BATCH_SIZE = 16

Prediction = namedtuple("Prediction", "path class_name probability")  # str, str, 0..1


def predict(run, images, top=1):
    """Yield a Prediction for each readable image, the `top` most probable classes of each, in the order given.

    Args:
        run: a run folder with a `tuned.safetensors`.
        images: a path or a list of paths, of files and of folders; a folder is searched through for image files.
        top: rows per image, most probable first.

    An image that cannot be read is logged with its reason and left out.

    Raises:
        UserError: no tuned network, a path that is not there, a folder without images, or not one readable image.
    """
    network, max_megapixels = _tuned_network(run)
    paths = find_images([images] if isinstance(images, (str, os.PathLike)) else images)
    return _predict(network, paths, top, max_megapixels)


def find_images(paths):
    """Files as they are, folders replaced by the image files below them, in order. Raises UserError."""
    found = []
    for given in paths:
        path = expand_user(given)
        if path.is_dir():
            below = images_below(path, Counter())
            if not below:
                raise UserError(f"{path}: no image files in this folder ({' '.join(IMAGE_EXTENSIONS)})")
            found += below
        elif path.exists():
            found.append(str(path))
        else:
            raise UserError(f"{path}: no such file or folder")
    return found


def _tuned_network(run):
    """(network, the run's loader.max_megapixels)."""
    folder = RunFolder(run)
    loader = ((folder.record() or {}).get("config") or {}).get("loader") or {}
    if not folder.tuned_file.is_file():
        status = (folder.record() or {}).get("status", "unknown")
        raise UserError(f"{folder.path}: no tuned network here (status: {status}); finish the training first")
    network = load_network_file(folder.tuned_file)
    return network.eval(), loader.get("max_megapixels", MAX_MEGAPIXELS)


def _predict(network, paths, top, max_megapixels):
    transform = Transform.for_network(network.description)
    classes = network.description["class_names"]
    bad = 0
    for start in progress_bar(range(0, len(paths), BATCH_SIZE), desc="classifying", unit="batch"):
        readable, images = _load(paths[start:start + BATCH_SIZE], transform, max_megapixels)
        bad += min(BATCH_SIZE, len(paths) - start) - len(readable)
        if not readable:
            continue
        with torch.no_grad():
            probabilities = torch.softmax(network(images).float(), dim=1)  # [B, C]
        values, labels = probabilities.topk(min(top, probabilities.shape[1]), dim=1)
        for path, row, row_labels in zip(readable, values.tolist(), labels.tolist()):
            for probability, label in zip(row, row_labels):
                yield Prediction(path, classes[label] if classes else str(label), probability)
    if bad == len(paths):
        raise UserError(f"none of the {bad} images could be read; the reasons are above")
    if bad:
        LOG.warning("%d of %d images could not be read and are left out", bad, len(paths))


def _load(paths, transform, max_megapixels):
    """(paths that can be read, images [B, 3, S, S])."""
    readable, tensors = [], []
    for path in paths:
        try:
            tensors.append(transform(load_image(path, max_megapixels, transform.minimum_side)))
            readable.append(path)
        except BadImage as error:
            LOG.warning("%s", error)
    return readable, torch.stack(tensors) if tensors else None
