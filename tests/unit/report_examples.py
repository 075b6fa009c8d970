"""Run folders for the tests of reports, written by the code that runs write them with."""

import math

from piebridge.core.run_folder import RunFolder

DEVICE = {"type": "cpu", "name": "Board CPU", "cores": 2, "threads": 2}


def write_run(folder, method, seed=0, status="success", accuracy=0.9, seconds=100.0, pet="head", epochs=4, device=DEVICE,
              dataset="Clipart10", peak_mib=900.5, parameters=12810, ended="2026-11-30T10:00:00Z", loader=(), optimizer=(), images="11aa",
              energy=None, phases=()):
    run = RunFolder(folder)
    results = {"test_accuracy": accuracy, "val_accuracy": 0.9, "train_seconds": seconds, "wall_seconds": None, "phases": dict(phases),
               "peak_mib": peak_mib, "trainable_parameters": parameters, "energy_j": energy}
    run.write_record({"status": status, "method": method, "network": "efficientnet_lite0", "dataset": dataset, "pet": pet,
                      "seed": seed, "device": device, "ended": ended, "data_sha256": images, "versions": {}, "results": results,
                      "config": {"epochs": epochs, "seed": seed, "loader": dict({"batch_size": 4}, **dict(loader)),
                                 "optimizer": dict({"lr": 1e-3}, **dict(optimizer))}, "plan": None})
    rows = [{"epoch": epoch, "train_loss": 1.0 / (epoch + 1), "train_seconds": (seconds or 1.0) * (epoch + 1) / epochs,
             "val_accuracy": (accuracy or 0.5) - 0.3 * math.exp(-epoch)} for epoch in range(epochs)]
    run.write_metrics(rows)
    return run.path
