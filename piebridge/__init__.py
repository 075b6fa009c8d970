"""Fine-tune a pretrained network on the device that owns the data, and get the original network back, tuned.

Importing this package imports nothing heavy; torch is loaded by the first call.
"""

__version__ = "0.1.0"
__all__ = ["engine", "load_network", "load_proxy_set", "predict", "train"]


def __getattr__(name):
    """`piebridge.engine` without importing it first; it needs a newer torch than the rest."""
    if name == "engine":
        import importlib

        return importlib.import_module("piebridge.engine")
    raise AttributeError("module 'piebridge' has no attribute {!r}".format(name))


def load_network(name_or_path, is_pretrained=True):
    """An `nn.Module`: `forward(x[N,3,H,W]) -> logits[N,C]`, `.features(x) -> [N,D]`; by name or from a network file."""
    from piebridge.core.networks import load_network as load

    return load(name_or_path, is_pretrained)


def load_proxy_set(folder, is_reordered=False):
    """A proxy set made by `piebridge forge`: `.original`, `.proxies` and what else is in the folder; see core/proxy_set.py."""
    from piebridge.core.proxy_set import load_proxy_set as load

    return load(folder, is_reordered)


def train(config_or_run, images=None, **overrides):
    """Train one run and return its result (the fields of run.json); `train("efficientnet_lite0/Clipart10/ours", epochs=2)`.

    images: an iterable of (image, label) to train on as they come, in place of the data set's training images; see training.train.
    """
    from piebridge.training import train as run

    return run(config_or_run, images, **overrides)


def predict(run, images, top=1):
    """Classify files or folders with a run's tuned network: an iterator of `piebridge.core.prediction.Prediction`."""
    from piebridge.core.prediction import predict as classify
    from piebridge.run_paths import find_run_folder

    return classify(find_run_folder(run), images, top)
