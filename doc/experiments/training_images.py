"""Links the training images of a data set, and no others, into one folder without labels: what a forge may see.

    python doc/experiments/training_images.py Openclipart res/forge/images
"""

import sys
from pathlib import Path

from features import open_part


def main(data, folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    samples = open_part(data, "train")
    for number, sample in enumerate(samples):
        link = folder / f"{number:05d}{Path(sample.path).suffix}"
        if not link.is_symlink():
            link.symlink_to(Path(sample.path).resolve())
    print(f"{len(samples)} images in {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
