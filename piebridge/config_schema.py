"""Every key of a configuration: its type, default, meaning and bounds, one frozen dataclass per section."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Optional, Tuple

from piebridge.config_options import are_blocks, check_levels, check_limit, check_size, is_router, option, workers_option
from piebridge.core.methods import METHODS, STRATEGIES

# those of core/backends/registry.py, which needs torch; a test compares them
BACKEND_NAMES = ("eager", "channels_last", "folded", "bf16", "torchscript", "onnxruntime", "openvino", "openvino_bf16")


@dataclass(frozen=True)
class Splits:
    val_fraction: float = option(0.1, "share of each class kept for validation, where the data has no val folder", low=0.0, high=0.9)
    test_fraction: float = option(0.2, "share of each class kept for the test, where the data has no test folder", low=0.0, high=0.9)
    seed: int = option(0, "seed of the split; not changed by `seed`, so that all runs see the same test images", low=0,
                      high=2 ** 31 - 1)
    shots: int = option(0, "training images per class whose labels are used, drawn with the split's seed; 0: all", low=0, high=10 ** 6)


@dataclass(frozen=True)
class Pseudo:
    kind: str = option("none", "labels for the images that splits.shots leaves unlabelled: none (they are left out), or confidence: the "
                       "network's own predictions where it is sure of them", choices=("none", "confidence"))
    threshold: float = option(0.95, "least softmax probability of a prediction that is taken for a label", low=0.0, high=1.0)
    warmup_epochs: int = option(3, "epochs on the labelled images alone, before the first predictions", low=1, high=100000)


@dataclass(frozen=True)
class Stream:
    samples: int = option(0, "train on a stream: samples per epoch, each view seen once; 0: on a data set", low=0, high=10 ** 7)


@dataclass(frozen=True)
class Loader:
    batch_size: int = option(4, "images per training step", low=1, high=65536)
    eval_batch_size: int = option(16, "images per step of an evaluation", low=1, high=65536)
    workers: Any = workers_option()
    augment: str = option("none", "fresh augmentation, each epoch anew", choices=("none", "flip", "crop_flip"))
    max_megapixels: float = option(64.0, "larger images are refused before they are decoded", low=0.01)
    max_bad_files: int = option(10, "unreadable images that are skipped before a run gives up", low=0)


@dataclass(frozen=True)
class Pet:
    kind: str = option("head", "what is trainable", choices=("head", "last_k", "norm", "bias", "adapter", "lora", "sparse", "head2toe",
                                                             "lst", "all"))
    scheme: str = option("last_block", "sparse: what is trained beside the head: a scheme's name, a YAML file or its text, as of "
                         "`piebridge engine`", is_path=True)
    head_first: int = option(0, "epochs in which the head alone is trained before the others join it, on features that are computed once; "
                             "0: all begin together", low=0, high=100000)
    head_last: int = option(0, "epochs in which the head alone is trained on when all is done, on unaugmented images; kept where it is "
                            "better on validation", low=0, high=100000)
    last_k: int = option(3, "last_k: how many blocks are trained with the head", low=1, high=10000)
    r: int = option(8, "adapter: its width; lora: the rank; lst: how many times narrower the side network is", low=1, high=65536)
    alpha: float = option(16.0, "lora: what is added to a weight is multiplied with alpha / r", low=0.0, high=1e6)
    dropout: float = option(0.0, "lora: dropout on the input of A", low=0.0, high=0.99)
    target: Tuple[str, ...] = option((), "lora: layers by the last parts of their paths, such as qkv or attn.proj; all where none is named")
    blocks: Any = option("all", "adapter, lora: the blocks they are put into; lst, head2toe: those that feed them: all, last:N, or a "
                         "list of their names", accepts=are_blocks, wanted="all, last:N, or a list of names")
    layer_features: int = option(512, "head2toe: about how many features a layer is pooled to", low=1, high=65536)
    keep: float = option(0.1, "head2toe: share of all features, the most relevant, that the head is trained on", low=1e-6, high=1.0)
    penalty: float = option(1e-4, "head2toe: group lasso of the head that finds them", low=0.0, high=1e6)


@dataclass(frozen=True)
class Optimizer:
    kind: str = option("adamw", "update rule", choices=("adamw", "sgd"))
    lr: float = option(1e-3, "peak learning rate", low=0.0, high=1e6)
    momentum: float = option(0.9, "momentum of sgd", low=0.0, high=0.9999)
    weight_decay: float = option(0.01, "weight decay", low=0.0, high=1e6)
    schedule: str = option("cosine", "learning rate over the run", choices=("cosine", "constant"))
    label_smoothing: float = option(0.1, "label smoothing", low=0.0, high=0.99)


@dataclass(frozen=True)
class PruneTrain:
    strength: float = option(1e-4, "factor of the group lasso in the loss", low=0.0, high=1e6)
    threshold: float = option(1e-4, "a channel goes when no weight of it is as large in any layer that writes or reads it", low=0.0,
                              high=1e6)
    every: int = option(1, "epochs between two removals of channels", low=1, high=100000)


@dataclass(frozen=True)
class Elastic:
    rho: float = option(0.4, "share of the whole backward's time that the chosen tensors' backward may take", low=0.0, high=1.0)
    every: int = option(1, "epochs for which a choice of tensors holds", low=1, high=100000)


@dataclass(frozen=True)
class Backend:
    name: str = option("auto", "what frozen segments run on; auto: the fastest, measured", choices=("auto",) + BACKEND_NAMES)
    tolerance: float = option(1e-3, "largest relative error of a feature vector against eager", low=0.0)


@dataclass(frozen=True)
class Cache:
    kind: str = option("none", "what is kept across epochs; auto: features where that is exact",
                       choices=("none", "features", "pixels", "auto"))
    dtype: str = option("float32", "how features are kept; the error of float16 and int8 is measured and recorded",
                        choices=("float32", "float16", "int8"))
    views: int = option(0, "augmented views kept of each image, shown in turn; 0: a fresh one each epoch, which cannot be kept", low=0,
                        high=1000)
    shared: bool = option(False, "keep rows for other runs, and use theirs; a run that finds some shows less time than it would take alone")
    folder: Optional[str] = option(None, "where shared rows are; default: $PIEBRIDGE_CACHE/rows or ~/.cache/piebridge/rows", is_path=True)
    budget: str = option("10GiB", "most that the folder may take, such as 512MiB; what was not used for longest makes room",
                         check=check_size)
    augment: str = option("none", "change cached features at each use: noise, or mixup within a class", choices=("none", "noise", "mixup"))
    augment_strength: float = option(0.1, "noise in standard deviations of a feature; mixup: the largest weight of the other sample",
                                     low=0.0, high=10.0)


@dataclass(frozen=True)
class Proxies:
    levels: Tuple[str, ...] = option((), "proxies, such as 160px, 224px-drop2, 192px-int8", check=check_levels)
    set: Optional[str] = option(None, "folder of a proxy set (`piebridge forge`), in place of levels that the device makes", is_path=True)
    use: str = option("auto", "auto: only the levels that are predicted to pay; all: every level", choices=("auto", "all"))
    bridge: str = option("fitted", "what takes a proxy's features to the original's: fitted (a map fitted on training images, after that "
                         "of the set if there is one), set (the set's alone) or none", choices=("fitted", "set", "none"))
    loading: str = option("resident", "levels in memory: resident (all), or double_buffer (two at most: that in use, and the next one, "
                          "which a thread builds)", choices=("resident", "double_buffer"))
    calibration_images: int = option(64, "unlabelled training images that fit the bridge maps", low=8, high=100000)


@dataclass(frozen=True)
class Router:
    kind: str = option("none", "how a sample gets its first level: none, residual, policy, shuffled (another sample's by the policy), "
                       "importance (the original; the gate moves it), random (as many on each as with residual, by lot) or level:N",
                       accepts=is_router, wanted="none, residual, policy, shuffled, importance, random or level:N")
    skips_proxies: bool = option(False, "leave samples out of an epoch that would go to a proxy")
    predictor: str = option("device", "of kind=residual; device: fitted here on calibration images; set: what the proxy set has, with "
                            "its own scores, which takes no pass of the original", choices=("device", "set"))
    tolerance: float = option(0.35, "largest relative residual that a level may leave at the head's tap", low=0.0)
    lowers: bool = option(False, "whether a sample's level goes down again, towards the original, when its loss rises")
    closing: int = option(0, "last epochs, in which every sample goes through the original; kind=random has as many go there all along, "
                         "where more than the head is trained",
                         low=0, high=100000)
    audit: float = option(0.0, "share of the proxies' batches whose gradient is compared with the original's; 0: none", low=0.0, high=1.0)
    audit_floor: float = option(0.5, "a level is given up when the running mean of the cosine of those gradients falls below it", low=-1.0,
                                high=1.0)
    delta: float = option(0.1, "largest share of samples whose level may leave more than that; 0.5 goes by the typical residual",
                          low=0.001, high=0.9)


@dataclass(frozen=True)
class Gate:
    kind: str = option("none", "which samples run backward: none (all), loss, batch (all of a batch or none), unbiased, "
                       "selective_backprop, infobatch, or auto: loss where skipping saves time",
                       choices=("none", "loss", "batch", "unbiased", "selective_backprop", "infobatch", "auto"))
    momentum: float = option(0.8, "momentum of the running loss that a sample is compared with", low=0.0, high=0.9999)
    factor: float = option(0.8, "of gate.kind=batch: a batch runs where its loss is above this times the running loss; -1: all do "
                           "(EMAalpha of the released artifact)", low=-1.0, high=100.0)
    drop: float = option(0.5, "unbiased, infobatch: chance of a low-loss sample to be left out; the others count 1 / (1 - drop) times",
                         low=0.0, high=0.99)
    full_epochs: float = option(0.125, "unbiased, infobatch: share of the epochs, the last ones, that run on every sample", low=0.0,
                                high=1.0)
    beta: float = option(1.0, "selective_backprop: power of the loss's quantile; about 1 in beta + 1 samples runs backward", low=0.0,
                         high=100.0)
    history: int = option(1024, "selective_backprop: how many losses the quantile is taken of", low=1, high=1000000)


@dataclass(frozen=True)
class Plan:
    seconds: float = option(60.0, "of strategy=auto and `piebridge plan`: most seconds of measuring; a run takes less, a part of its time",
                            low=0.0, high=3600.0)
    ram: str = option("", "most memory that a strategy may take, such as 2GiB; none given: no limit", check=check_limit)
    disk: str = option("", "most that a strategy may keep on disk, such as 500MiB; none given: no limit", check=check_limit)
    exact: bool = option(False, "only strategies that train on what plain training would train on")


@dataclass(frozen=True)
class Checkpoint:
    seconds: float = option(60.0, "longest time between two checkpoints; there is one at each epoch's end too", low=0.0)


@dataclass(frozen=True)
class Config:
    method: str = option("ours", "row of the comparison table", choices=tuple(METHODS))
    network: str = option("efficientnet_lite0", "name of a network, or a network file", is_path=True)
    data: str = option("Clipart10", "name of a data set, or a folder of images")
    device: str = option("auto", "auto, cpu, cuda or cuda:N")
    epochs: int = option(12, "passes over the training images", low=1, high=100000)
    seed: int = option(0, "seed of everything random", low=0, high=2 ** 31 - 1)
    output: Optional[str] = option(None, "run folder; default: beside the configuration", is_path=True)
    resume: str = option("auto", "auto: go on from a checkpoint; none: start anew", choices=("auto", "none"))
    overwrite: bool = option(False, "replace a finished run")
    strategy: str = option("configured", "what to do for a sample: as the other keys say, the cheapest that is predicted here (auto), or "
                           "the paper's algorithm, with a proxy set",
                           choices=tuple(STRATEGIES))
    as_released: bool = option(False, "do as the released artifact of the paper does, where that differs from the paper")
    step: str = option("eager", "training step: eager (autograd), direct (the known gradient of a linear head), prune_train (autograd, "
                       "group lasso, channels removed), elastic (autograd for chosen tensors), fresh_adam (Adam made anew each step) or "
                       "compiled (one graph of forward, backward and update)",
                       choices=("eager", "direct", "prune_train", "elastic", "fresh_adam", "compiled"))
    trust_pickle: bool = option(False, "allow files that can run code when they are read")
    splits: Splits = Splits()
    pseudo: Pseudo = Pseudo()
    stream: Stream = Stream()
    loader: Loader = Loader()
    pet: Pet = Pet()
    optimizer: Optimizer = Optimizer()
    prune_train: PruneTrain = PruneTrain()
    elastic: Elastic = Elastic()
    backend: Backend = Backend()
    cache: Cache = Cache()
    proxies: Proxies = Proxies()
    router: Router = Router()
    gate: Gate = Gate()
    plan: Plan = Plan()
    checkpoint: Checkpoint = Checkpoint()

    def as_dict(self):
        """Nested plain values, ready for JSON and YAML."""
        return _plain(dataclasses.asdict(self))


SECTIONS = {field.name: type(field.default) for field in dataclasses.fields(Config) if dataclasses.is_dataclass(field.default)}


def known_keys():
    """Every dotted key with its dataclass field."""
    keys = {}
    for field in dataclasses.fields(Config):
        if field.name not in SECTIONS:
            keys[field.name] = field
    for name, section in SECTIONS.items():
        for field in dataclasses.fields(section):
            keys[f"{name}.{field.name}"] = field
    return keys


def describe_keys():
    """(key, default, text) of every key, in file order; choices are part of the text."""
    rows = []
    for key, field in known_keys().items():
        choices = field.metadata["choices"]
        rows.append((key, field.default, field.metadata["text"] + (f" ({' | '.join(choices)})" if choices else "")))
    return rows


def _plain(value):
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
