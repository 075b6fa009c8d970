"""What strategies are predicted to take, against sums by hand; which one is chosen; what the limits rule out."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from pet_examples import family, settings

from piebridge.config import Config, build_config
from piebridge.core.errors import UserError
from piebridge.core.plan_costs import Costs
from piebridge.core.planner import Planner, as_record, describe, strategies, with_settings
from piebridge.core.tuning import Tuning

INT8 = SimpleNamespace(name="224px-int8", resolution=224, precision="int8", share=0.5)
SMALL = SimpleNamespace(name="160px", resolution=160, precision="float", share=0.5)
NAMES = ["plain", "pixels", "features", "proxy features", "views", "hybrid", "proxies"]


@pytest.fixture(scope="module")
def head():
    return Tuning(family("tower", dtype=torch.float32), settings("head"))


@pytest.fixture(scope="module")
def whole():
    return Tuning(family("tower", dtype=torch.float32), settings("all"))


def config_of(**changes):
    return with_settings(Config(), dict({"epochs": 12, "router.kind": "residual"}, **changes))


def costs():
    return Costs(decode={224: 2.0, 160: 1.0}, frozen={"original": 4.0, "224px-int8": 2.0, "160px": 2.0},
                 trained={"original": 0.5, "224px-int8": 0.5, "160px": 0.3}, cached=0.05, row_values=1280)


def planner(config, levels=(INT8,)):
    return Planner(config, costs(), list(levels), samples=1000, spent=0.7, resident_mib=500.0, network_mib=20.0)


def predictions(config, tuning, levels=(INT8,)):
    found = [planner(config, levels).predict(strategy) for strategy in strategies(config, tuning, list(levels))]
    assert [each.strategy.name for each in found] == NAMES
    return {each.strategy.name: each for each in found}


def test_seconds_are_passes_times_images_times_milliseconds(head):
    found = predictions(config_of(), head)
    fixed = 0.7 + 12 * 0.01
    assert found["plain"].seconds == pytest.approx(12 * (2.0 + 4.0 + 0.5) + fixed)
    assert found["pixels"].seconds == pytest.approx(2.0 + 12 * (4.0 + 0.5) + fixed)
    assert found["features"].seconds == pytest.approx(2.0 + 4.0 + 12 * 0.05 + fixed)
    assert found["proxy features"].seconds == pytest.approx(2.0 + 2.0 + 12 * 0.05 + fixed + 0.3)  # one more network is built
    assert found["proxies"].seconds == pytest.approx(12 * (2.0 + 2.0 + 0.5) + fixed + 0.3)
    assert [name for name in NAMES if found[name].why_not] == ["views", "hybrid"]
    for each in found.values():
        assert each.why_not or each.seconds == pytest.approx(sum(each.parts.values()))


def test_memory_and_disk(head):
    found = predictions(config_of(), head)
    assert found["features"].disk_mib == pytest.approx(1000 * 1280 * 4 / 2 ** 20) and found["features"].ram_mib == 500
    assert found["pixels"].disk_mib == pytest.approx(1000 * 3 * 224 ** 2 / 2 ** 20)
    assert found["plain"].disk_mib == 0 and found["proxies"].ram_mib == 520
    halved = predictions(config_of(**{"cache.dtype": "float16"}), head)
    assert halved["features"].disk_mib == pytest.approx(found["features"].disk_mib / 2)


def test_fresh_views_leave_what_keeps_a_stated_number_of_them(head):
    found = predictions(config_of(**{"loader.augment": "crop_flip"}), head)
    assert [name for name in NAMES if found[name].why_not is None] == ["plain", "views", "hybrid", "proxies"]
    assert found["features"].why_not == "each epoch shows fresh views"
    assert found["views"].strategy.settings["cache.views"] == 4
    assert found["views"].seconds == pytest.approx(4 * (2.0 + 4.0) + 12 * 0.05 + 0.7 + 0.12)
    assert found["hybrid"].seconds == pytest.approx(4 * (2.0 + 2.0) + 12 * 0.05 + 0.7 + 0.12 + 0.3)
    few = predictions(config_of(**{"loader.augment": "crop_flip", "epochs": 2}), head)
    assert few["views"].why_not == few["hybrid"].why_not == "there are too few epochs to show a view twice"


def test_what_trains_from_the_image_on_keeps_nothing_but_pixels(whole):
    found = predictions(config_of(**{"router.kind": "level:1"}), whole, (SMALL,))
    assert [name for name in NAMES if found[name].why_not is None] == ["plain", "pixels", "proxies"]
    assert found["features"].why_not == "pet.kind=head trains from the image on"
    assert found["proxies"].seconds == pytest.approx(12 * (1.0 + 2.0 + 0.3) + 0.7 + 0.12 + 0.3)


def test_closing_epochs_and_pruned_ones_count(whole):
    config = config_of(**{"router.kind": "level:1", "router.closing": 2, "loader.augment": "crop_flip", "gate.kind": "infobatch",
                          "gate.drop": 0.5, "gate.full_epochs": 0.0})
    found = predictions(config, whole, (SMALL,))
    run = 1 - 0.6 * 0.5
    assert found["proxies"].seconds == pytest.approx(10 * run * (1.0 + 2.0 + 0.3) + 2 * (2.0 + 4.0 + 0.5) + 0.7 + 0.12 + 0.3)


def test_there_are_no_more_closing_epochs_than_epochs(whole):
    config = config_of(**{"router.kind": "level:1", "router.closing": 99, "loader.augment": "crop_flip"})
    found = predictions(config, whole, (SMALL,))
    assert found["proxies"].seconds == pytest.approx(found["plain"].seconds + 0.3)


def test_streams_keep_nothing(head):
    found = predictions(config_of(**{"stream.samples": 100, "loader.augment": "crop_flip"}), head)
    assert {found[name].why_not for name in ("pixels", "features", "proxy features", "views", "hybrid")} == {"samples come once"}


@pytest.mark.parametrize("changes, chosen", [
    ({}, "proxy features"), ({"plan.exact": True}, "features"), ({"plan.disk": "1MiB"}, "proxies"),
    ({"plan.disk": "1MiB", "plan.ram": "510MiB"}, "plain"), ({"plan.exact": True, "plan.disk": "1MiB"}, "plain"),
    ({"plan.ram": "510MiB"}, "features")])
def test_the_cheapest_within_the_limits_is_chosen(head, changes, chosen):
    config = config_of(**changes)
    found = predictions(config, head)
    assert planner(config).choose(list(found.values())).strategy.name == chosen


@pytest.mark.parametrize("changes", [{"cache.dtype": "int8"}, {"cache.dtype": "float16"}, {"cache.augment": "noise"}])
def test_rounded_and_augmented_features_are_not_exact(head, changes):
    found = predictions(config_of(**dict(changes, **{"plan.exact": True})), head)
    assert found["features"].why_not == "plan.exact=true"
    assert predictions(config_of(), head)["features"].strategy.is_exact


def test_what_augments_features_has_to_keep_some(head):
    found = predictions(config_of(**{"cache.augment": "noise"}), head)
    assert [name for name in NAMES if found[name].why_not is None] == ["features", "proxy features"]
    assert found["plain"].why_not == found["proxies"].why_not == "keeps no features that cache.augment=noise could change"


def test_residuals_route_at_the_heads_tap_alone(whole):
    """Otherwise the chosen strategy would be refused by core/trained_levels.py."""
    found = predictions(config_of(), whole, (SMALL,))
    assert found["proxies"].why_not == "router.kind=residual goes by features at the head's tap"


def test_limits_that_nothing_meets_are_named(head):
    config = config_of(**{"plan.ram": "100MiB"})
    with pytest.raises(UserError) as caught:
        planner(config).choose(list(predictions(config, head).values()))
    message = str(caught.value)
    assert message.startswith("plan: no strategy respects the limits (plain: takes 500 MiB of memory, plan.ram=100MiB; ")
    assert message.endswith("raise plan.ram or plan.disk, or use plan.exact=false") and "\n" not in message


def test_a_plan_as_json_and_as_text(head):
    found = list(predictions(config_of(), head).values())
    chosen = planner(config_of()).choose(found)
    record = json.loads(json.dumps(as_record(chosen, found)))
    assert (record["name"], record["settings"]["cache.kind"]) == ("proxy features", "features")
    assert record["predicted_seconds"] == pytest.approx(chosen.seconds, abs=1e-3) and len(record["strategies"]) == 7
    assert [each["seconds"] is None for each in record["strategies"]] == [math.isnan(each.seconds) for each in found]
    lines = describe(chosen, found)
    assert lines[0].split()[:2] == ["strategy", "seconds"] and lines[-1].startswith("chosen: proxy features, the fewest seconds")
    assert any("(not here: all epochs show the same view)" in line for line in lines)


def test_settings_replace_keys_of_sections():
    config = with_settings(Config(), {"epochs": 3, "cache.kind": "features", "cache.views": 2})
    assert (config.epochs, config.cache.kind, config.cache.views, config.cache.dtype) == (3, "features", 2, Config().cache.dtype)


@pytest.mark.parametrize("given, message", [
    ({"plan.ram": "much"}, "'much' is not a size; write for example 512MiB or 2GiB"),
    ({"method": "PET", "strategy": "auto"}, "strategy=auto chooses how samples are served, method PET says how; use method=ours")])
def test_wrong_words(given, message):
    with pytest.raises(UserError) as caught:
        build_config(given, {})
    assert message in str(caught.value)
