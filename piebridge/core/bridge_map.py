"""The closed-form map from a proxy's tap features to the original's."""

import hashlib

import numpy as np


class BridgeMap:
    """y = mean_y + a (x - mean_x) + (x - mean_x) W: the proxy's features, moved to where the original's would be.

    `scale` a is one number (a lower resolution leaves less to average away, so features grow); W [D, D] is kept as a product of two
    factors, since it is mostly fitted on fewer samples than it has columns.
    """

    def __init__(self, scale, mean_proxy, mean_original, left, right):
        self.scale, self.mean_proxy, self.mean_original, self.left, self.right = scale, mean_proxy, mean_original, left, right

    def __call__(self, features):
        """float32 [N, D] -> float32 [N, D]."""
        centred = features - self.mean_proxy
        return self.mean_original + self.scale * centred + (centred @ self.left) @ self.right

    def fingerprint(self):
        """sha256 (hex) over its numbers."""
        digest = hashlib.sha256()
        for array in (self.scale, self.mean_proxy, self.mean_original, self.left, self.right):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def of_rank(self, rank):
        """The nearest map whose W has at most this rank, by the singular values of W: what a file of a proxy set keeps."""
        if self.left.shape[1] <= rank:
            return self
        first, first_factor = np.linalg.qr(self.left.astype(np.float64))
        second, second_factor = np.linalg.qr(self.right.T.astype(np.float64))
        columns, values, rows = np.linalg.svd(first_factor @ second_factor.T)
        left, right = first @ (columns[:, :rank] * values[:rank]), rows[:rank] @ second.T
        return BridgeMap(self.scale, self.mean_proxy, self.mean_original,
                         *[np.ascontiguousarray(factor, dtype=np.float32) for factor in (left, right)])


class Chain:
    """One bridge map after the other: that of a set, then what these images show it to lack."""

    def __init__(self, *maps):
        self._maps = maps

    def __call__(self, features):
        for each in self._maps:
            features = each(features)
        return features

    def fingerprint(self):
        return [each.fingerprint() for each in self._maps]


def fit_bridge_map(proxy, original, penalties=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0)):
    """Ridge regression of the original's features on the proxy's, both float [N, D]; (BridgeMap, residuals [N]).

    With few samples the map must not wander far from a multiple of the identity, so what the best multiple leaves is regressed, and
    the penalty (in units of the mean eigenvalue of the N x N Gram matrix) is the one with the least leave-one-out error, which ridge
    regression gives in closed form: e_i / (1 - h_ii). The returned residuals are those leave-one-out errors relative to the
    original's norm: what the map leaves on samples that it has not seen, and so the label of the router.
    """
    proxy, original = np.asarray(proxy, np.float64), np.asarray(original, np.float64)
    if proxy.shape != original.shape or proxy.ndim != 2 or len(proxy) < 2:
        raise ValueError(f"bridge map: needs two equal [N, D] arrays with N > 1, got {proxy.shape} and {original.shape}")
    if not (np.isfinite(proxy).all() and np.isfinite(original).all()):
        raise ValueError("bridge map: features that are not finite")
    mean_proxy, mean_original = proxy.mean(0), original.mean(0)
    inputs = proxy - mean_proxy
    targets = original - mean_original
    multiple = float((inputs * targets).sum() / max((inputs ** 2).sum(), 1e-12))
    targets = targets - multiple * inputs
    eigenvalues, rows, basis = _principal(inputs)
    products = rows.T @ targets
    norms = np.linalg.norm(original, axis=1) + 1e-12
    scale = max(eigenvalues.sum() / len(inputs), 1e-12)  # of the N x N Gram matrix, whichever form was taken
    best = None
    for penalty in penalties:
        damped = eigenvalues + penalty * scale
        errors = targets - rows @ (products / damped[:, None])
        leverage = (rows ** 2) @ (1 / damped) + 1.0 / len(proxy)  # the mean is fitted too
        residuals = np.linalg.norm(errors, axis=1) / np.maximum(1 - leverage, 1e-3) / norms
        score = float((residuals ** 2).mean())
        if best is None or score < best[0]:
            best = (score, damped, residuals)
    _, damped, residuals = best
    left, right = basis(products / damped[:, None])
    as_float = [np.ascontiguousarray(array, dtype=np.float32) for array in (mean_proxy, mean_original, left, right)]
    return BridgeMap(np.float32(multiple), *as_float), residuals


def _principal(inputs):
    """(eigenvalues [R], rows [N, R], basis) of the Gram matrix of inputs [N, D], from the smaller of its two forms; R = min(N, D).

    The columns of `rows` are the inputs' principal components, orthogonal, with the eigenvalues as their squared norms. `basis` takes
    coefficients [R, C] of rows and gives the factors (left [D, R], right [R, C]) whose product takes inputs to the same values.
    """
    count, width = inputs.shape
    if count > width:
        eigenvalues, vectors = np.linalg.eigh(inputs.T @ inputs)
        return np.maximum(eigenvalues, 0.0), inputs @ vectors, lambda coefficients: (vectors, coefficients)
    eigenvalues, vectors = np.linalg.eigh(inputs @ inputs.T)
    roots = np.sqrt(np.maximum(eigenvalues, 0.0))
    inverse = np.where(roots > 1e-10 * max(roots.max(), 1e-300), 1 / np.maximum(roots, 1e-300), 0.0)
    return roots ** 2, vectors * roots, lambda coefficients: (inputs.T, vectors @ (inverse[:, None] * coefficients))
