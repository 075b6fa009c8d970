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
    "ours": Method("PieBridge: proxies, router, gate, the fastest backend, and a cache where one is exact", {},
                   {"cache.kind": "auto", "router.kind": "residual", "gate.kind": "auto", "step": "direct",
                    "proxies.levels": ("224px-int8", "192px-int8", "160px-int8", "224px-drop1", "160px")}),
}
