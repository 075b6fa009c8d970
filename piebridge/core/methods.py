"""The methods: rows of the comparison table, each a name for settings. Building them is core/assembly.py's work."""

from collections import namedtuple

# fixed: what the name stands for, refused when a configuration says otherwise; defaults: what it may change
Method = namedtuple("Method", "text fixed defaults")

_PLAIN = {"step": "eager", "cache.kind": "none", "proxies.levels": (), "proxies.set": None, "router.kind": "none", "gate.kind": "none"}

_OURS = {"cache.kind": "auto", "router.kind": "residual", "gate.kind": "auto", "step": "direct",
         "proxies.levels": ("224px-int8", "192px-int8", "160px-int8", "224px-drop1", "160px")}

METHODS = {
    "FTAll": Method("full fine-tuning as published: every layer, every image through the whole network",
                    dict(_PLAIN, **{"pet.kind": "all", "backend.name": "eager"}), {"optimizer.lr": 3e-4}),
    "PruneTrain": Method("full fine-tuning under a group lasso, of a network whose emptied channels are removed meanwhile",
                         dict(_PLAIN, **{"pet.kind": "all", "backend.name": "eager", "step": "prune_train"}), {"optimizer.lr": 3e-4}),
    "ElasticTrainer": Method("full fine-tuning of the tensors that matter most now, within a share of the backward's time",
                             dict(_PLAIN, **{"pet.kind": "all", "backend.name": "eager", "step": "elastic"}), {"optimizer.lr": 3e-4}),
    "PET": Method("parameter-efficient tuning as published: the frozen original runs eagerly on every image in every epoch",
                  dict(_PLAIN, **{"backend.name": "eager"}), {}),
    "PET_fast": Method("PET with its frozen part on the fastest backend, and nothing else changed", _PLAIN, {}),
    "PET_cache": Method("PET with an exact feature cache, and nothing else changed",
                        dict(_PLAIN, **{"backend.name": "eager", "cache.kind": "features"}), {}),
    "PET_fast_cache": Method("PET with both, the fastest backend and an exact feature cache, and nothing else changed",
                             dict(_PLAIN, **{"cache.kind": "features"}), {}),
    "last_k": Method("the last blocks and the head, everything else frozen, eagerly on every image in every epoch",
                     dict(_PLAIN, **{"pet.kind": "last_k", "backend.name": "eager"}), {}),
    "BitFit": Method("every bias and the head (Ben Zaken et al. 2022), eagerly on every image in every epoch",
                     dict(_PLAIN, **{"pet.kind": "bias", "backend.name": "eager"}), {}),
    "LoRA": Method("low-rank updates (Hu et al. 2022) and the head, eagerly on every image in every epoch",
                   dict(_PLAIN, **{"pet.kind": "lora", "backend.name": "eager"}), {}),
    "SelectiveBackprop": Method("PET with Selective-Backprop: the larger a sample's loss, the likelier its backward",
                                dict(_PLAIN, **{"backend.name": "eager", "gate.kind": "selective_backprop"}), {}),
    "InfoBatch": Method("PET with InfoBatch: each epoch leaves out half of the low-loss images and rescales the rest",
                        dict(_PLAIN, **{"backend.name": "eager", "gate.kind": "infobatch"}), {}),
    "Head2Toe": Method("a linear head on selected features of all layers, which are computed once",
                       dict(_PLAIN, **{"backend.name": "eager", "pet.kind": "head2toe", "cache.kind": "features"}),
                       {"optimizer.lr": 1e-2}),
    "LST": Method("ladder side tuning: a small side network fed by the frozen blocks, with no backward through them",
                  dict(_PLAIN, **{"backend.name": "eager", "pet.kind": "lst"}), {}),
    "Sparse": Method("a sparse update (PockEngine, MICRO'23): what a scheme names, in a compiled step, behind the fastest backend",
                     {"pet.kind": "sparse", "proxies.levels": (), "proxies.set": None, "router.kind": "none"}, {"step": "compiled"}),
    "ours": Method("PieBridge: proxies, router, gate, the fastest backend, and a cache where one is exact", {}, _OURS),
    # `ours` with one thing changed
    "skip_instead_of_proxy": Method("ours, where samples that would go to a proxy are skipped, so that nothing is trained through one",
                                    {"router.skips_proxies": True, "cache.kind": "none"}, _OURS),
    "random_routing": Method("ours, with as many samples on each proxy, drawn by lot", {"router.kind": "random"}, _OURS),
    "static_proxy": Method("ours, with one proxy of half the cost for all samples", {},
                           dict(_OURS, **{"router.kind": "level:1", "proxies.levels": ("160px",)})),
    "no_alignment": Method("ours, routed alike, without the maps that take the proxies' features to the original's",
                           {"proxies.bridge": "none"}, _OURS),
    "no_gate": Method("ours, with every sample running backward, so that levels stay what the router gave", {"gate.kind": "none"}, _OURS),
    "no_policy": Method("ours, where every sample starts at the original and only the gate moves it",
                        {"router.kind": "importance", "cache.kind": "none"}, _OURS),
    "no_cache": Method("ours, with every sample going through its network in every epoch", {"cache.kind": "none"}, _OURS),
    "with_augmentation": Method("ours, with a fresh random crop and flip of each image in each epoch, which nothing can cache",
                                {"loader.augment": "crop_flip"}, _OURS),
}

# strategy: settings that belong together, refused when a configuration says otherwise
STRATEGIES = {
    "configured": {},
    "auto": {},  # core/planner.py chooses
    "paper": {"router.kind": "policy", "gate.kind": "loss", "cache.kind": "none", "proxies.use": "all", "proxies.bridge": "set",
              "proxies.loading": "double_buffer"},
}

# what a method's name stands for beside that, under a strategy
UNDER_A_STRATEGY = {("paper", "random_routing"): {"router.kind": "shuffled"}}  # as many samples on each level as the policy puts there

_AS_RELEASED = {"loader.augment": "none", "splits.val_fraction": 0.0, "cache.kind": "none", "optimizer.kind": "sgd",
                "optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0, "optimizer.schedule": "constant",
                "optimizer.label_smoothing": 0.0, "step": "eager"}
_ROUTED = dict(_AS_RELEASED, **{"router.kind": "policy", "gate.kind": "batch", "gate.momentum": 9 / 11, "proxies.levels": (),
                                "proxies.use": "all", "proxies.bridge": "set"})
# what as_released=true makes of a method, in the place of what its name stands for otherwise
RELEASED = {
    "ours": _ROUTED,
    "PET": dict(_ROUTED, **{"gate.factor": -1.0}),  # the routed path of `ours`, with a gate that is always open
    "FTAll": dict(_AS_RELEASED, **{"pet.kind": "all", "proxies.levels": (), "proxies.set": None, "router.kind": "none",
                                   "gate.kind": "none"}),
}


def released_settings(method, pet_kind):
    """What as_released=true stands for with a method of RELEASED and a PET kind."""
    return dict(RELEASED[method], step="fresh_adam") if pet_kind == "adapter" else RELEASED[method]
