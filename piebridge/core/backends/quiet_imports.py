"""The inference libraries, imported without what they would tell their makers: images and their use stay on the device."""

import sys


def import_openvino():
    """OpenVINO. Its import sends an event where the package `openvino_telemetry` can be imported; where not, a stub does nothing."""
    if "openvino" not in sys.modules:
        sys.modules.setdefault("openvino_telemetry", None)  # importing it fails from now on
    import openvino

    return openvino


def import_onnxruntime():
    """ONNX Runtime, with its telemetry off."""
    import onnxruntime

    if hasattr(onnxruntime, "disable_telemetry_events"):
        onnxruntime.disable_telemetry_events()
    return onnxruntime
