"""How a row lies on disk: float32, float16, or int8 with a scale of its own; pixels as they are."""

import numpy as np

from piebridge.core.errors import UserError

FEATURE_DTYPES = ("float32", "float16", "int8")
LARGEST_HALF = 65504.0
_STORED = {"float32": "<f4", "float16": "<f2", "int8": "i1", "uint8": "u1"}
_SCALE_BYTES = 4


class RowCodec:
    """Rows of `shape`, each as `row_bytes` bytes.

    int8 is symmetric with one scale a row, s = max|x| / 127 (float32, before the values), x' = s round(x / s), so |x' - x| <= s / 2.
    uint8 is for pixels, which are read as they were written; every other type is read as float32.
    """

    def __init__(self, dtype, shape):
        self.dtype, self.shape = dtype, tuple(int(size) for size in shape)
        self._stored = np.dtype(_STORED[dtype])
        self._scale_bytes = _SCALE_BYTES if dtype == "int8" else 0
        self.values = int(np.prod(self.shape))
        self.row_bytes = self._scale_bytes + self.values * self._stored.itemsize

    def encode(self, rows):
        """float32 (uint8 for pixels) [B, *shape] -> (uint8 [B, row_bytes], the largest |x' - x| / |x| of a row, 2-norms)."""
        flat = np.ascontiguousarray(rows).reshape(len(rows), self.values)
        if self.dtype in ("float32", "uint8"):
            return _as_bytes(flat.astype(self._stored, copy=False)), 0.0
        if self.dtype == "float16":
            self._check_range(flat)
            packed = _as_bytes(flat.astype(self._stored))
        else:
            scale = (np.abs(flat).max(axis=1, keepdims=True) / 127).astype("<f4")
            values = np.rint(flat / np.where(scale > 0, scale, 1)).astype(np.int8)
            packed = np.concatenate([_as_bytes(scale), values.view(np.uint8)], axis=1)
        return packed, _largest_error(self.decode(packed).reshape(flat.shape), flat)

    def decode(self, packed):
        """uint8 [B, row_bytes] -> float32 (uint8 for pixels) [B, *shape]."""
        shape = (len(packed),) + self.shape
        if self.dtype == "int8":
            scale = np.ascontiguousarray(packed[:, :_SCALE_BYTES]).view("<f4")
            return (packed[:, _SCALE_BYTES:].view(np.int8) * scale).reshape(shape)
        values = packed.view(self._stored).reshape(shape)
        return values.astype(np.float32) if self.dtype == "float16" else values

    def _check_range(self, flat):
        largest = float(np.abs(flat).max()) if flat.size else 0.0
        if largest > LARGEST_HALF:
            raise UserError(f"cache.dtype=float16: holds numbers up to {LARGEST_HALF:g}, and the features reach {largest:.3g}; use "
                            "cache.dtype=int8 or float32")


def _as_bytes(array):
    return array.view(np.uint8).reshape(len(array), -1)


def _largest_error(decoded, rows):
    if not len(rows):
        return 0.0
    errors = np.linalg.norm(decoded.astype(np.float64) - rows, axis=1)
    return float((errors / np.maximum(np.linalg.norm(rows.astype(np.float64), axis=1), 1e-30)).max())
