"""Difficulty: the residual that a level leaves at the head's tap, predicted for each sample, with a bound that holds."""

import logging
import math

import numpy as np

LOG = logging.getLogger(__name__)
LEAST_RESIDUAL = 1e-9  # two networks that agree would have the logarithm of zero
ROUNDING = 1e-9  # a product such as 30 * (1 - 0.1) may come out a little above the whole number that it is


class ResidualRouter:
    """Gives a sample the cheapest level whose residual stays within a tolerance, with a stated certainty; else the original.

    predictor: ResidualPredictor of levels 1 to L. tolerance: largest relative residual. delta: P(the level given leaves more than
    the tolerance) is at most this, see ResidualPredictor.bound.
    """

    def __init__(self, predictor, tolerance, delta):
        self.predictor, self.tolerance, self.delta = predictor, tolerance, delta
        is_bounded(len(predictor.scores), delta)

    def __call__(self, features):
        """Features float [N, D] of the proxy that the predictor was fitted on -> levels int64 [N]."""
        return self.levels(self.predictor(features))

    def levels(self, predicted):
        """Predicted residuals [N, L] -> levels int64 [N]; what is not a number is never within the tolerance."""
        is_within = self.predictor.bound(predicted, self.delta) <= self.tolerance
        cheapest = is_within.shape[1] - np.argmax(is_within[:, ::-1], axis=1)
        return np.where(is_within.any(axis=1), cheapest, 0).astype(np.int64)


class ResidualPredictor:
    """The residuals of one or more levels, predicted from one proxy's features, and upper bounds of them.

    log r = offsets + (u - mean) W for the direction u = f / |f| of the features f. Arrays, float64: mean [D], weights W [D, L],
    offsets and spreads [L] (typical errors of log r), scores [n]: of each calibration image, the largest over the levels of
    (log r - predicted log r) / spread.
    """

    def __init__(self, mean, weights, offsets, spreads, scores):
        self.mean, self.weights, self.offsets, self.spreads = mean, weights, offsets, spreads
        self.scores = np.sort(scores)

    def __call__(self, features):
        """float [N, D] -> predicted relative residuals, float64 [N, L]: as often too large as too small."""
        return np.exp(self.offsets + (_directions(features) - self.mean) @ self.weights)

    def of_levels(self, places):
        """The same for some of its levels (list of positions). Scores are the largest over all, so its bounds hold as well."""
        return ResidualPredictor(self.mean, self.weights[:, places], self.offsets[places], self.spreads[places], self.scores)

    def bound(self, predicted, delta):
        """Predicted residuals [N, L] -> upper bounds [N, L], infinite where the calibration images are too few for this delta.

        Split conformal prediction (Vovk et al. 2005; Lei et al. 2018): for an image exchangeable with the n of the scores, which
        the fit has not seen, P(score > q) <= delta for their ceil((n + 1)(1 - delta))-th smallest q. A score is the largest over
        the levels, so r <= predicted * exp(q * spread) holds at all levels at once, and whichever is chosen by its bound being
        within a tolerance, P(chosen and r > tolerance) <= delta.
        """
        quantile = self.quantile(delta)
        return predicted * np.exp(quantile * self.spreads) if quantile < math.inf else np.full_like(predicted, math.inf)

    def quantile(self, delta):
        """The score that a new image exceeds with probability delta at most; infinite where the images are too few to say so."""
        rank = _rank(len(self.scores), delta)
        return float(self.scores[rank - 1]) if rank <= len(self.scores) else math.inf


def is_bounded(count, delta):
    """Whether `count` calibration images are enough for a finite bound at this delta; where not, the log says what that means."""
    if _rank(count, delta) > count:
        LOG.warning("router: %d calibration images are too few for router.delta=%g, which takes %d: no proxy serves any sample; give "
                    "more images or a larger delta", count, delta, math.ceil(1 / delta - 1 - ROUNDING))
        return False
    return True


def relative_residuals(bridged, original):
    """|bridged - original| / |original| of features [N, D], float64 [N]: what a level leaves at the head's tap."""
    bridged, original = np.asarray(bridged, np.float64), np.asarray(original, np.float64)
    return np.linalg.norm(bridged - original, axis=1) / (np.linalg.norm(original, axis=1) + 1e-12)


def fit_residual_predictor(features, residuals, held_back=None, penalties=(0.1, 0.3, 1.0, 3.0, 10.0)):
    """(ResidualPredictor, predictions [n, L] of each image's residuals without that image), by ridge regression in dual form.

    features: float [n, D] through one proxy. residuals: float [n, L] of the levels, cheapest last ([n]: of one level). The penalty,
    in units of the mean eigenvalue of the Gram matrix, is the one with the least leave-one-out error.
    held_back: (features, residuals) of further images, for the scores; the bound then holds for any distribution. Without them
    the scores are the leave-one-out errors (the jackknife): right asymptotically, since ridge regression is stable (Steinberger
    and Leeb 2023), for sets too small to be split.
    """
    inputs, targets = _directions(features), _log_residuals(residuals)
    if len(inputs) != len(targets) or len(inputs) < 2:
        raise ValueError(f"residual predictor: needs features and residuals of the same images, two or more, got {len(inputs)} and "
                         f"{len(targets)}")
    if not (np.isfinite(inputs).all() and np.isfinite(targets).all()):
        raise ValueError("residual predictor: features or residuals that are not finite")
    mean, offsets = inputs.mean(0), targets.mean(0)
    dual, errors = _ridge(inputs - mean, targets - offsets, penalties)
    spreads = np.sqrt((errors ** 2).mean(0)) + 1e-6
    predictor = ResidualPredictor(mean, (inputs - mean).T @ dual, offsets, spreads, (errors / spreads).max(1))
    if held_back is not None:
        surprise = _log_residuals(held_back[1]) - np.log(predictor(held_back[0]))
        predictor = ResidualPredictor(mean, predictor.weights, offsets, spreads, (surprise / spreads).max(1))
    return predictor, np.exp(targets - errors)


def _ridge(inputs, targets, penalties):
    """(dual coefficients [n, L], leave-one-out errors [n, L]) of centred inputs [n, D] and targets [n, L], at the best penalty."""
    eigenvalues, vectors = np.linalg.eigh(inputs @ inputs.T)
    eigenvalues = np.maximum(eigenvalues, 0.0)
    rotated = vectors.T @ targets
    scale = max(eigenvalues.mean(), 1e-12)
    best = None
    for penalty in penalties:
        shrink = eigenvalues / (eigenvalues + penalty * scale)
        leverage = (vectors ** 2) @ shrink + 1.0 / len(inputs)  # the mean is fitted too
        errors = (targets - vectors @ (shrink[:, None] * rotated)) / np.maximum(1 - leverage, 1e-3)[:, None]
        score = float((errors ** 2).mean())
        if best is None or score < best[0]:
            best = (score, vectors @ (rotated / (eigenvalues + penalty * scale)[:, None]), errors)
    return best[1:]


def _rank(count, delta):
    return int(math.ceil((count + 1) * (1 - delta) - ROUNDING))


def _log_residuals(residuals):
    residuals = np.asarray(residuals, np.float64)
    return np.log(residuals.reshape(len(residuals), -1) + LEAST_RESIDUAL)


def _directions(features):
    features = np.asarray(features, np.float64)
    return features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-12)
