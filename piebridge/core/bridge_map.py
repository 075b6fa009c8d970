"""The closed-form map from a proxy's tap features to the original's."""

import numpy as np


class BridgeMap:
    """y = mean_y + a (x - mean_x) + (x - mean_x) W: the proxy's features, moved to where the original's would be.

    `scale` a is one number (a lower resolution leaves less to average away, so features grow); W [D, D] is kept as a product of two
    factors, since it is fitted on far fewer samples than it has columns.
    """

    def __init__(self, scale, mean_proxy, mean_original, left, right):
        self.scale, self.mean_proxy, self.mean_original, self.left, self.right = scale, mean_proxy, mean_original, left, right

    def __call__(self, features):
        """float32 [N, D] -> float32 [N, D]."""
        centred = features - self.mean_proxy
        return self.mean_original + self.scale * centred + (centred @ self.left) @ self.right

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


def fit_bridge_map(proxy, original, penalties=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0)):
    """Ridge regression of the original's features on the proxy's, both float [N, D]; (BridgeMap, residuals [N]).

    With few samples the map must not wander far from a multiple of the identity, so what the best multiple leaves is regressed, and
    the penalty (in units of the mean eigenvalue of the Gram matrix) is the one with the least leave-one-out error, which ridge
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
    eigenvalues, vectors = np.linalg.eigh(inputs @ inputs.T)  # dual form: N x N, N being the smaller side
    eigenvalues = np.maximum(eigenvalues, 0.0)
    rotated = vectors.T @ targets
    norms = np.linalg.norm(original, axis=1) + 1e-12
    scale = max(eigenvalues.mean(), 1e-12)
    best = None
    for penalty in penalties:
        shrink = eigenvalues / (eigenvalues + penalty * scale)
        errors = targets - vectors @ (shrink[:, None] * rotated)
        leverage = (vectors ** 2) @ shrink + 1.0 / len(proxy)  # the mean is fitted too
        residuals = np.linalg.norm(errors, axis=1) / np.maximum(1 - leverage, 1e-3) / norms
        score = float((residuals ** 2).mean())
        if best is None or score < best[0]:
            best = (score, penalty, residuals)
    _, penalty, residuals = best
    dual = vectors @ (rotated / (eigenvalues + penalty * scale)[:, None])  # [N, D]
    as_float = [np.ascontiguousarray(array, dtype=np.float32) for array in (mean_proxy, mean_original, inputs.T, dual)]
    return BridgeMap(np.float32(multiple), *as_float), residuals
