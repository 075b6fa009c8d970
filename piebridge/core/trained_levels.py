"""Levels that a trainable part deeper than the head is trained through: whole networks, from their taps on through autograd."""

import logging

import numpy as np
import torch

from piebridge.core.errors import UserError
from piebridge.core.graph import INPUT
from piebridge.core.offers import offers
from piebridge.core.packages import one_line
from piebridge.core.routing import Routing
from piebridge.core.set_routers import policy_of
from piebridge.core.sources import Level

LOG = logging.getLogger(__name__)


class TrainedLevels:
    """Builds and routes the levels on offer. part: a `FrozenPart`, whose Tuning gets a level for each network of its own.

    Another resolution needs no network, only images. No level can be int8: no gradient goes through it.
    """

    def __init__(self, part):
        self.part, self.work, self.config = part, part.work, part.config

    def levels_and_routing(self):
        """(list of Levels, the original first; level of each sample, int [samples]). UserError for a router that needs feature vectors."""
        kind, work = self.config.router.kind, self.work
        if kind == "residual":
            raise UserError("router.kind=residual: goes by what a level leaves at the head's tap, and "
                            f"pet.kind={self.config.pet.kind} trains what lies before it; use router.kind=random, policy, level:N or none")
        with work.clock.phase("proxies"):
            found, proxy_set = offers(self.config, work.network, work.fingerprint)
            left_out = [offer.name for offer in found if offer.precision == "int8"]
            if left_out:
                LOG.info("levels left out, since nothing can be trained through int8: %s", ", ".join(left_out))
            able = [offer for offer in found if offer.precision != "int8"]
            wanted = self._wanted(kind, able)
            levels = [self.part.original] + [self._level(offer) for offer in wanted]
            routing = self._routing(kind, wanted, proxy_set)
        names = [level.name for level in levels[1:]]
        work.decisions.decide("proxies", lambda: {
            "levels": names, "reason": f"router.kind={kind}" + "".join(f"; {name} left out: int8" for name in left_out)})
        used = {level.name: int((routing == number).sum()) for number, level in enumerate(levels)}
        work.decisions.decide("levels_used", lambda: used)
        return levels, routing

    def _wanted(self, kind, able):
        if not kind.startswith("level:"):
            return able
        number = int(kind[len("level:"):])
        if number > len(able):
            raise UserError(f"router.kind={kind}: there are {len(able)} levels to train through ({', '.join(each.name for each in able)})")
        return able[number - 1:number] if number else []

    def _level(self, offer):
        """The Level of an offer; what is trained is the same as in the original."""
        tuning, size = self.part.tuning.eval(), offer.resolution
        network = offer.make(*self._images(offer))
        number = 0 if network is self.work.network else tuning.add_level(network, offer.cuts)
        frozen, like = tuning.frozen(number), tuning.head.weight
        try:
            with torch.no_grad():
                tuning(frozen.features(torch.zeros([1, 3, size, size], dtype=like.dtype, device=like.device)), number)
        except RuntimeError as error:
            raise UserError(f"proxies: level {offer.name}: network {self.work.network.description['name']} does not run on images of "
                            f"{size} x {size} pixels ({one_line(error)[:160]})") from None
        tuning.train()
        segment = None if tuning.tap_of(number) == INPUT else self.part.loading.open(
            lambda: self.part.segment(frozen, size, offer.precision))
        return Level(offer.name, self.part.loader(size), segment, number=number)

    def _images(self, offer):
        """What a proxy that is made here is made of: the calibration images at the original's size and at its own."""
        if not offer.needs_images:
            return ()
        batches = self.part.loader([self.part.native, offer.resolution]).batches([self.part.calibration], self.work.view_seed(0))
        return [tensor.to(self.work.device) for tensor in next(batches)[1]]

    def _routing(self, kind, wanted, proxy_set):
        if kind == "random":
            return self._by_lot(len(wanted))
        if kind in ("policy", "shuffled"):
            return Routing(self.part).by_policy(*policy_of(proxy_set, self.config, [offer.name for offer in wanted]))
        return np.full(self.part.count, 0 if kind == "importance" else len(wanted), dtype=np.int64)

    def _by_lot(self, proxies):
        """As many samples at the original as there are closing epochs among the epochs, the others at any proxy; without closing epochs any
        level. So what closing epochs would spend on the original is spent all along."""
        random, count = np.random.RandomState((self.config.seed * 1000 + 7) % 2 ** 32), self.part.count
        if not self.config.router.closing or not proxies:
            return random.randint(proxies + 1, size=count)
        at_original = random.permutation(count) < round(count * min(1.0, self.config.router.closing / self.config.epochs))
        return np.where(at_original, 0, random.randint(1, proxies + 1, size=count))
