"""Settings of a configuration that cannot hold together."""

from piebridge.core.methods import METHODS, RELEASED


def contradictions(config):
    """(keys, text) of settings that cannot hold together, in the user's words."""
    for part in (_of_cache, _of_pseudo_labels, _against_stream, _of_step, _of_head_alone, _of_routing, _of_method):
        yield from part(config)


def _of_cache(config):
    is_fresh = config.loader.augment != "none" and not config.cache.views
    if config.cache.kind in ("features", "pixels") and is_fresh:
        yield (("cache.kind", "loader.augment"), f"cache.kind={config.cache.kind} keeps views of each image, loader.augment="
               f"{config.loader.augment} asks for a fresh one each epoch; set how many to keep, such as cache.views=4")
    if config.cache.views and config.loader.augment == "none":
        yield (("cache.views", "loader.augment"), f"cache.views={config.cache.views}: loader.augment=none shows one view of each image; "
               "use cache.views=0, or augment")
    if config.cache.augment != "none" and config.cache.kind not in ("features", "auto"):
        yield (("cache.augment", "cache.kind"), f"cache.augment={config.cache.augment} changes cached features, and cache.kind="
               f"{config.cache.kind} keeps none; use cache.kind=features")
    if config.cache.augment == "mixup" and config.cache.augment_strength > 1:
        yield (("cache.augment_strength",), f"cache.augment_strength={config.cache.augment_strength:g}: the weight of the other sample in "
               "a mixup is at most 1")


def _of_pseudo_labels(config):
    if config.pseudo.kind == "none":
        return
    if not config.splits.shots:
        yield (("pseudo.kind", "splits.shots"), f"pseudo.kind={config.pseudo.kind} labels what is unlabelled, and nothing is; add "
               "splits.shots=K")
    if 1 - config.optimizer.label_smoothing < config.pseudo.threshold:
        yield (("pseudo.threshold", "optimizer.label_smoothing"), f"optimizer.label_smoothing={config.optimizer.label_smoothing} teaches "
               f"to be less sure than pseudo.threshold={config.pseudo.threshold}, so that hardly an image gets a label; use "
               "optimizer.label_smoothing=0.0")
    if config.pseudo.warmup_epochs >= config.epochs:
        yield (("pseudo.warmup_epochs", "epochs"), f"pseudo.warmup_epochs={config.pseudo.warmup_epochs}: epochs={config.epochs} end before "
               "the first image gets a label; use fewer")
    if config.cache.augment == "mixup":
        yield (("cache.augment", "pseudo.kind"), "cache.augment=mixup mixes samples of one class, and that of the unlabelled ones is "
               "not known; use cache.augment=noise")


def _of_step(config):
    if config.step == "direct" and config.pet.kind != "head":
        yield ("step", "pet.kind"), "step=direct is the step of a linear head; use step=eager"
    if config.step in ("prune_train", "elastic") and config.pet.kind != "all":
        yield ("step", "pet.kind"), f"step={config.step} is a step of the whole network; use pet.kind=all, not {config.pet.kind}"
    if config.step == "compiled":
        yield from _of_compiled_step(config)


def _of_compiled_step(config):
    has_proxies = config.router.kind != "none" and (bool(config.proxies.levels) or config.proxies.set is not None)
    for key, is_set, reason in (
            ("gate.kind", config.gate.kind not in ("none", "infobatch", "auto"),
             f"gate.kind={config.gate.kind} chooses samples by losses that are known when the update is done; use gate.kind=none"),
            ("router.audit", config.router.audit > 0,
             f"router.audit={config.router.audit:g} needs gradients, which it does not put out; use router.audit=0.0"),
            ("strategy", config.strategy == "auto", "strategy=auto does not know what it costs; use strategy=configured, or step=eager"),
            ("router.kind", has_proxies and config.pet.kind not in ("head", "head2toe") and config.cache.kind != "features",
             f"it trains through the original alone, and router.kind={config.router.kind} sends samples through proxies; use "
             "router.kind=none, or step=eager")):
        if is_set:
            yield ("step", key), f"step=compiled: {reason}"


def _of_head_alone(config):
    for name in ("head_first", "head_last"):
        epochs = getattr(config.pet, name)
        for key, is_set, reason in (
                ("pet.kind", config.pet.kind in ("head", "head2toe"), f"pet.kind={config.pet.kind} trains nothing but a head"),
                ("stream.samples", config.stream.samples > 0, "the head sees all images several times, a stream's samples are seen once"),
                ("pseudo.kind", config.pseudo.kind != "none", "images without labels have none for the head"),
                ("as_released", config.as_released, "the artifact trains all trainable blocks from beginning to end"),
                ("strategy", config.strategy != "configured", f"strategy={config.strategy} says itself what a run does")):
            if epochs and is_set:
                yield (f"pet.{name}", key), f"pet.{name}={epochs}: {reason}; use pet.{name}=0"


def _of_routing(config):
    kind = config.router.kind
    if kind.startswith("level:") and kind != "level:0" and not config.proxies.levels and config.proxies.set is None:
        yield (("router.kind", "proxies.levels"), f"router.kind={kind} asks for a proxy, and there is none; give proxies.levels or "
               "proxies.set")
    if kind in ("policy", "shuffled") and config.proxies.set is None:
        yield (("router.kind", "proxies.set"), f"router.kind={kind} asks the policy of a proxy set; give proxies.set=FOLDER, "
               "made by piebridge forge")
    elif config.proxies.bridge == "set" and config.proxies.set is None:
        yield (("proxies.bridge", "proxies.set"), "proxies.bridge=set takes the maps of a proxy set, and there is none; give "
               "proxies.set=FOLDER, or use proxies.bridge=fitted")
    if (kind, config.router.predictor, config.proxies.bridge) == ("residual", "set", "none"):
        yield (("router.predictor", "proxies.bridge"), "router.predictor=set reads features that a set's map has brought to the "
               "original's, and proxies.bridge=none leaves the map out; use router.predictor=device")


def _of_method(config):
    fixed = METHODS[config.method].fixed
    if config.as_released and config.method not in RELEASED:
        yield ("as_released", "method"), f"as_released=true: the artifact has {', '.join(RELEASED)}, and not {config.method}"
    if config.strategy != "configured" and config.as_released:
        yield ("as_released", "strategy"), f"as_released=true does as the artifact does, strategy={config.strategy} does not; choose one"
    if config.strategy == "auto" and fixed:
        yield ("strategy", "method"), f"strategy=auto chooses how samples are served, method {config.method} says how; use method=ours"
    elif config.strategy != "configured" and "proxies.set" in fixed:
        yield (("strategy", "method"), f"strategy={config.strategy} trains through proxies, method {config.method} stands for none; "
               "use method=ours")
    if config.pet.kind == "all" and fixed.get("pet.kind") != "all":
        yield ("pet.kind", "method"), f"pet.kind=all trains the whole network, method {config.method} a part of it; use method=FTAll"


def _against_stream(config):
    if not config.stream.samples:
        return
    if config.cache.kind in ("features", "pixels") or config.cache.views:
        given = f"cache.views={config.cache.views}" if config.cache.views else f"cache.kind={config.cache.kind}"
        yield (("cache.kind", "cache.views", "stream.samples"), f"{given} keeps what is seen again, and a stream's samples are seen once; "
               f"use {given.partition('=')[0]}={0 if config.cache.views else 'none'}")
    if config.pseudo.kind != "none":
        yield ("pseudo.kind", "stream.samples"), "pseudo.kind: a stream's samples come with their labels, and do not come again; use none"
    if config.router.kind != "none" and not config.router.kind.startswith("level:"):
        yield (("router.kind", "stream.samples"), f"router.kind={config.router.kind} looks at all samples before it trains on them, and a "
               "stream's are seen once; use none or level:N")
    for key, is_set, reason, cure in _needing_samples_again(config):
        if is_set:
            yield (key.partition("=")[0], "stream.samples"), f"{key}: {reason}, and a stream's samples are seen once; use {cure}"


def _needing_samples_again(config):
    """(key=value, whether it is set, why it needs samples that come again, what to use instead)."""
    yield ("gate.kind=infobatch", config.gate.kind == "infobatch", "leaves samples out by their losses of the epoch before",
           "gate.kind=unbiased")
    yield ("router.skips_proxies=true", config.router.skips_proxies, "leaves samples out of each epoch by their levels",
           "router.skips_proxies=false")
    yield ("router.lowers=true", config.router.lowers, "compares a sample's loss with that of the epoch before", "router.lowers=false")
    yield (f"router.audit={config.router.audit:g}", config.router.audit > 0, "looks at images once more, through the original",
           "router.audit=0.0")
    yield "pet.kind=head2toe", config.pet.kind == "head2toe", "looks at all samples before it trains on them", "another PET kind"
    yield "as_released=true", config.as_released, "cuts a data set into whole batches and drops the rest", "as_released=false"
