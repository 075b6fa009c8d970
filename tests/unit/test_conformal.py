"""The bound of a residual: against the definition of a conformal quantile, refitting, simulated data, and real features."""

import json
import logging
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from piebridge.core.cascade import Cascade
from piebridge.core.dataset import open_dataset
from piebridge.core.difficulty import ResidualPredictor, ResidualRouter, fit_residual_predictor, is_bounded, relative_residuals
from piebridge.core.errors import UserError
from piebridge.core.levels import Candidate
from piebridge.core.loader import ImageLoader
from piebridge.core.networks import load_network
from piebridge.core.predictor_file import load_predictor, save_predictor
from piebridge.core.safetensors_file import read_safetensors, write_safetensors
from piebridge.core.set_routers import policy_of, residual_router_of
from piebridge.core.set_routers import predictor_of as predictor_of_set
from piebridge.core.transforms import Transform

TOO_FEW = ("router: 8 calibration images are too few for router.delta=0.1, which takes 9: no proxy serves any sample; give more images or "
           "a larger delta")


def predictor_of(scores, offsets=(0.0,), width=2):
    """Predicts exp(offset) whatever the features; spreads of 1."""
    levels = len(offsets)
    return ResidualPredictor(np.zeros(width), np.zeros((width, levels)), np.array(offsets), np.ones(levels), np.array(scores))


def sample(random, count, width=6, levels=1):
    """(features, residuals): log residuals linear in the direction, with noise of heavy tails that the levels share in part."""
    features = random.randn(count, width)
    direction = features / np.linalg.norm(features, axis=1, keepdims=True)
    shared = random.standard_t(3, (count, 1))
    noise = 0.3 * shared + 0.2 * random.standard_t(3, (count, levels))
    return features, np.exp(direction[:, :1] - 1.0 + 0.3 * np.arange(levels) + noise)


@pytest.mark.parametrize("count, delta, rank", [(9, 0.1, 9), (10, 0.1, 10), (19, 0.1, 18), (99, 0.05, 95), (29, 0.1, 27), (3, 0.5, 2)])
def test_the_quantile_is_the_conformal_one(count, delta, rank):
    """The ceil((n + 1)(1 - delta))-th smallest score, in whatever order they come."""
    scores = np.random.RandomState(0).permutation(np.arange(1.0, count + 1))
    assert predictor_of(scores).quantile(delta) == rank


def test_too_few_images_bound_nothing_and_the_log_says_so(caplog):
    with caplog.at_level(logging.WARNING, "piebridge"):
        router = ResidualRouter(predictor_of(np.zeros(8), offsets=(-9.0,)), tolerance=1e9, delta=0.1)
    assert caplog.messages == [TOO_FEW]
    assert router.predictor.quantile(0.1) == np.inf and not is_bounded(98, 0.01)
    assert router(np.ones((3, 2))).tolist() == [0, 0, 0]
    caplog.clear()
    assert ResidualRouter(predictor_of(np.zeros(9), offsets=(-9.0,)), 1e9, 0.1)(np.ones((3, 2))).tolist() == [1, 1, 1]
    assert is_bounded(99, 0.01) and not caplog.messages


def test_the_cheapest_level_within_the_tolerance_is_given():
    router = ResidualRouter(predictor_of(np.zeros(9), offsets=np.log([0.1, 0.2, 0.4])), tolerance=0.3, delta=0.1)
    assert router(np.ones((2, 2))).tolist() == [2, 2]
    predicted = np.array([[0.1, 0.2, 0.3], [0.1, 0.4, 0.2], [0.5, 0.4, 0.31], [np.nan] * 3, [0.3, 9, np.nan]])
    assert router.levels(predicted).tolist() == [3, 3, 0, 0, 1]


def test_the_bound_is_the_prediction_times_the_calibration_error():
    """Of one level: predicted * exp(quantile of log r - log predicted), whatever the spread."""
    random = np.random.RandomState(1)
    fitted, held_back, new = (sample(random, count) for count in (40, 30, 5))
    predictor, _ = fit_residual_predictor(*fitted, held_back=held_back)
    errors = np.sort(np.log(held_back[1][:, 0] / predictor(held_back[0])[:, 0]))
    bound = predictor.bound(predictor(new[0]), 0.1)
    np.testing.assert_allclose(bound, predictor(new[0]) * np.exp(errors[27]), rtol=1e-6)  # ceil(31 * 0.9) = 28


def test_predictions_left_out_are_those_of_a_fit_without_the_image():
    """Against ridge regression in primal form, refitted; the penalty is the whole fit's."""
    random = np.random.RandomState(2)
    features, residuals = sample(random, 12, width=4, levels=2)
    _, left_out = fit_residual_predictor(features, residuals, penalties=(1.0,))
    inputs = features / np.linalg.norm(features, axis=1, keepdims=True)
    targets = np.log(residuals + 1e-9)
    centred = inputs - inputs.mean(0)
    penalty = np.linalg.eigvalsh(centred @ centred.T).clip(0).mean()
    design = np.hstack([inputs, np.ones((12, 1))])
    for index in range(12):
        keep = np.arange(12) != index
        weights = np.linalg.solve(design[keep].T @ design[keep] + np.diag([penalty] * 4 + [0.0]), design[keep].T @ targets[keep])
        np.testing.assert_allclose(np.log(left_out[index]), design[index] @ weights, rtol=1e-6)


def test_a_predictor_of_some_levels_bounds_them_as_before():
    random = np.random.RandomState(6)
    predictor, _ = fit_residual_predictor(*sample(random, 40, levels=3), held_back=sample(random, 30, levels=3))
    features, _ = sample(random, 5)
    some = predictor.of_levels([0, 2])
    np.testing.assert_array_equal(some(features), predictor(features)[:, [0, 2]])
    np.testing.assert_array_equal(some.bound(some(features), 0.1), predictor.bound(predictor(features), 0.1)[:, [0, 2]])


def routing_config(**values):
    return SimpleNamespace(proxies=SimpleNamespace(set="sets/lite0"), router=SimpleNamespace(tolerance=0.3, delta=0.1, **values))


def proxy_set_of(predictor, names=("192px", "160px", "96px")):
    """Stands for a ProxySet of two features."""
    return SimpleNamespace(predictor=predictor, policy=None, original=SimpleNamespace(head=SimpleNamespace(in_features=2)),
                           proxies=[SimpleNamespace(name=name) for name in names])


def test_a_sets_predictor_routes_to_the_levels_that_are_here():
    predictor = predictor_of(np.zeros(9), offsets=np.log([0.1, 0.2, 0.4]))
    proxy_set, config, features = proxy_set_of(predictor), routing_config(), np.ones((2, 2))
    assert predictor_of_set(proxy_set, config) is predictor
    assert residual_router_of(proxy_set, predictor, config, ["192px", "160px", "96px"])(features).tolist() == [2, 2]
    assert residual_router_of(proxy_set, predictor, config, ["192px", "96px"])(features).tolist() == [1, 1]
    with pytest.raises(UserError, match="router.predictor=set: reads the features of 96px, which cannot run here; give "
                                        "router.predictor=device"):
        residual_router_of(proxy_set, predictor, config, ["192px"])


@pytest.mark.parametrize("proxy_set, problem", [
    (None, "router.predictor=set: proxies that are made on the device have no predictor; give a set that was forged with one, or "
           "router.predictor=device"),
    (proxy_set_of(None), "router.predictor=set: proxies.set=sets/lite0: has no predictor; give a set that was forged with one"),
    (proxy_set_of(predictor_of([0.0])), "proxies.set=sets/lite0: its predictor is for 2 features and 1 levels, and the set has 2 and 3; "
                                        "forge it anew, or give router.predictor=device")])
def test_a_set_without_a_fitting_predictor_is_refused(proxy_set, problem):
    with pytest.raises(UserError, match=problem):
        predictor_of_set(proxy_set, routing_config())


def test_a_set_without_a_policy_is_refused():
    config = routing_config(kind="shuffled")
    with pytest.raises(UserError, match="router.kind=shuffled: proxies.set=sets/lite0: has no policy; give a set that was forged with one, "
                                        "or router.kind=random"):
        policy_of(proxy_set_of(None), config, ["192px"])


def violations(predictor, features, residuals, tolerance, delta):
    """Whether each image is given a level that leaves more than the tolerance, and whether it exceeds any bound."""
    router = ResidualRouter(predictor, tolerance, delta)
    levels = router(features)
    given = np.where(levels > 0, residuals[np.arange(len(levels)), np.maximum(levels - 1, 0)], 0.0)
    return given > tolerance, (residuals > predictor.bound(predictor(features), delta)).any(1)


@pytest.mark.parametrize("levels, delta, count", [(1, 0.1, 39), (4, 0.1, 29), (4, 0.3, 29)])
def test_the_guarantee_holds_over_500_repetitions(levels, delta, count):
    """P(residual > tolerance and accepted) <= delta; the bound itself is exceeded with delta at most and delta - 1 / (n + 1) at least."""
    random, bad, exceeded, served = np.random.RandomState(3), [], [], []
    for _ in range(500):
        data = [sample(random, size, levels=levels) for size in (25, count, 4)]
        predictor, _ = fit_residual_predictor(*data[0], held_back=data[1], penalties=(0.3,))
        tolerance = 0.8
        wrong, above = violations(predictor, *data[2], tolerance, delta)
        bad.append(wrong.mean())
        exceeded.append(above.mean())
        served.append((ResidualRouter(predictor, tolerance, delta)(data[2][0]) > 0).mean())
    error = 3 * np.sqrt(delta * (1 - delta) / 500)  # of 500 independent draws; there are four images in each
    assert np.mean(bad) <= delta + error
    assert delta - 1 / (count + 1) - error <= np.mean(exceeded) <= delta + error
    assert np.mean(served) > 0.02  # the rule is not kept by accepting nothing


@pytest.fixture(scope="module")
def clipart():
    """Features of Clipart10 images through EfficientNet-Lite0 at 128 px (the original here), 96 px and 64 px."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    network = load_network("efficientnet_lite0")
    samples = open_dataset("Clipart10", SimpleNamespace(val_fraction=0.1, test_fraction=0.2, seed=0)).train[::3]
    sizes = (128, 96, 64)
    loader = ImageLoader(samples, [Transform.for_network(network.description, size=size) for size in sizes], workers=0)
    pieces = [list(range(start, min(start + 20, len(samples)))) for start in range(0, len(samples), 20)]
    with torch.no_grad():
        features = [[network.features(each).numpy() for each in images] for _, images in loader.batches(pieces)]
    torch.set_num_threads(threads)
    return [np.concatenate(each) for each in zip(*features)]


def test_the_guarantee_holds_on_real_features(clipart):
    """Random splits of real images: exchangeable by their making. Levels: 96 px and 64 px, scaled to the original's features."""
    original, *proxies = clipart
    assert len(original) == 140
    bridged = [each * (each * original).sum() / (each ** 2).sum() for each in proxies]
    residuals = np.stack([relative_residuals(each, original) for each in bridged], axis=1)
    tolerance, delta = float(np.median(residuals)), 0.1
    random, bad, exceeded = np.random.RandomState(0), [], []
    for _ in range(60):
        fit, held, new = np.split(random.permutation(140), [60, 110])
        predictor, _ = fit_residual_predictor(proxies[1][fit], residuals[fit], held_back=(proxies[1][held], residuals[held]))
        wrong, above = violations(predictor, proxies[1][new], residuals[new], tolerance, delta)
        bad.append(wrong.mean())
        exceeded.append(above.mean())
    error = 3 * np.std(exceeded) / np.sqrt(60)
    assert np.mean(bad) <= np.mean(exceeded) <= delta + error
    assert delta - 1 / 51 - error <= np.mean(exceeded)


def test_fits_that_make_no_sense_are_refused():
    for features, residuals, text in ((np.ones((1, 2)), [0.1], "two or more, got 1 and 1"), (np.ones((3, 2)), [0.1] * 4, "got 3 and 4"),
                                      (np.full((3, 2), np.nan), [0.1] * 3, "not finite")):
        with pytest.raises(ValueError, match="residual predictor: .*" + text):
            fit_residual_predictor(features, residuals)
    predictor, left_out = fit_residual_predictor(np.ones((4, 3)), np.full(4, 0.2))  # images of one colour
    np.testing.assert_allclose(left_out, 0.2, rtol=1e-6)
    np.testing.assert_allclose(predictor(np.ones((1, 3))), 0.2, rtol=1e-6)


def test_relative_residuals_are_the_formulas():
    np.testing.assert_allclose(relative_residuals([[3.0, 4.0], [1.0, 0.0]], [[3.0, 0.0], [2.0, 0.0]]), [4 / 3, 0.5])


def test_a_predictor_file_gives_the_same_bounds(tmp_path):
    features, residuals = sample(np.random.RandomState(4), 50, levels=3)
    predictor, _ = fit_residual_predictor(features[:30], residuals[:30], held_back=(features[30:], residuals[30:]))
    save_predictor(predictor, tmp_path / "predictor.safetensors")
    read = load_predictor(tmp_path / "predictor.safetensors")
    assert np.array_equal(read(features), predictor(features)) and read.quantile(0.1) == predictor.quantile(0.1)
    before = (tmp_path / "predictor.safetensors").read_bytes()
    save_predictor(read, tmp_path / "predictor.safetensors")
    assert (tmp_path / "predictor.safetensors").read_bytes() == before


@pytest.mark.parametrize("changes, metadata, problem", [
    ({"mean": None}, None, "it has the tensors offsets, scores, spreads, weights instead of mean, offsets, scores, spreads, weights"),
    ({"code": torch.zeros(1)}, None, "it has the tensors code, mean,"),
    ({"mean": torch.zeros(3)}, None, "tensor 'mean' is F32 [3], and should be F64 with 1 axes"),
    ({"weights": torch.zeros(2, 2, dtype=torch.float64)}, None, "tensor 'weights' is for 2 features, and those before it for 3"),
    ({"offsets": torch.zeros(5, dtype=torch.float64)}, None, "tensor 'offsets' is for 5 levels, and those before it for 2"),
    ({"scores": torch.zeros(0, dtype=torch.float64)}, None, "tensor 'scores' is for 0 images; 1 to 16777216 are possible"),
    ({"scores": torch.tensor([0.0, float("nan")], dtype=torch.float64)}, None, "tensor 'scores' has values that are not finite"),
    ({"spreads": torch.tensor([1.0, -1.0], dtype=torch.float64)}, None, "tensor 'spreads' has values that are not above zero"),
    ({}, {"piebridge_predictor": "2"}, "its metadata has piebridge_predictor='2', and this piebridge reads '1'"),
    ({}, {}, "its metadata has piebridge_predictor=None, and this piebridge reads '1'")])
def test_hostile_predictor_files_are_refused_in_one_line(tmp_path, changes, metadata, problem):
    path = tmp_path / "predictor.safetensors"
    save_predictor(predictor_of([0.0, 1.0], offsets=(0.0, 0.0), width=3), path)
    tensors, kept = read_safetensors(path)
    tensors.update(changes)
    write_safetensors(path, {name: each for name, each in tensors.items() if each is not None}, kept if metadata is None else metadata)
    with pytest.raises(UserError) as refusal:
        load_predictor(path)
    text = str(refusal.value)
    assert text.startswith(f"{path}: not a predictor of residuals ({problem}") and "\n" not in text
    assert text.endswith("; write it again with piebridge forge")


def test_files_that_are_no_safetensors_are_named(tmp_path):
    path = tmp_path / "predictor.safetensors"
    with pytest.raises(UserError, match="predictor.safetensors: no such file"):
        load_predictor(path)
    header = json.dumps({"mean": {"dtype": "F64", "shape": [1 << 40], "data_offsets": [0, 1 << 43]}}).encode()
    for content in (b"\x80\x04pickle", struct.pack("<Q", len(header)) + header):
        path.write_bytes(content)
        with pytest.raises(UserError, match="predictor.safetensors: not a valid safetensors file"):
            load_predictor(path)


class Rows:
    """Stands for a feature cache."""

    def __init__(self, features):
        self.read = lambda indices: features[indices]


def served_by(cascade, caches, everyone):
    """{level: samples} as a run's routing gives them, the cheapest level first."""
    pending, served = list(everyone), {}
    for number in range(len(caches), 0, -1):
        served[number] = cascade.accepted(number, caches, pending)
        pending = sorted(set(pending) - set(served[number]))
    return served


def test_random_routing_costs_what_residual_routing_costs():
    """As many samples at each level, though those that are left to the dearer levels are others."""
    random, count = np.random.RandomState(5), 4000
    features, residuals = sample(random, count, levels=3)
    candidates = []
    for level in range(3):
        predictor, _ = fit_residual_predictor(features[:200], residuals[:200, level])
        candidates.append(Candidate(None, ResidualRouter(predictor, 0.75, 0.2), 1.0, 0.5))
    caches, used = {level: Rows(features) for level in (1, 2, 3)}, {}
    for kind in ("residual", "random"):
        cascade = Cascade(candidates, kind, seed=1)
        served = served_by(cascade, caches, range(count))
        used[kind] = [len(served[level]) for level in (1, 2, 3)]
        assert len(set(sum(served.values(), []))) == sum(used[kind])
        assert served == served_by(cascade, caches, range(count))
    assert used["random"][2] == used["residual"][2] > 100  # the cheapest level: exactly
    assert used["residual"][0] > 200 and used["residual"][1] > 200
    np.testing.assert_allclose(used["random"], used["residual"], rtol=0.1)
    assert cascade.accepted(1, caches, []) == []
