"""The methods: rows of the comparison table, each a name for settings. Building them is core/assembly.py's work."""

from collections import namedtuple

# fixed: what the name stands for, refused when a configuration says otherwise; defaults: what it may change
Method = namedtuple("Method", "text fixed defaults")

_PLAIN = {"step": "eager", "cache.kind": "none", "proxies.levels": (), "proxies.set": None, "router.kind": "none", "gate.kind": "none"}

METHODS = {
    "FTAll": Method("full fine-tuning as published: every layer, every image through the whole network",
                    dict(_PLAIN, **{"pet.kind": "all", "backend.name": "eager"}), {"optimizer.lr": 3e-4}),
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
    "ours": Method("PieBridge: proxies, router, gate, the fastest backend, and a cache where one is exact", {},
                   {"cache.kind": "auto", "router.kind": "residual", "gate.kind": "auto", "step": "direct",
                    "proxies.levels": ("224px-int8", "192px-int8", "160px-int8", "224px-drop1", "160px")}),
}
