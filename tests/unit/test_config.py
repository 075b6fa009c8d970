"""Configuration: what is read, what is refused, and in which words."""

import os
from pathlib import Path

import pytest

from piebridge.config import build_config, describe_keys, known_keys, load_config, parse_overrides, read_yaml
from piebridge.config_schema import BACKEND_NAMES
from piebridge.config_unread import unread
from piebridge.core.errors import UserError
from piebridge.core.methods import METHODS
from piebridge.run_paths import list_configs


def refused(tmp_path, text, overrides=()):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_precedence_is_default_method_file_override(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("method: FTAll\nepochs: 5\noptimizer: {momentum: 0.5}\n")
    config = load_config(path, ["epochs=7", "optimizer.kind=sgd"])
    assert (config.epochs, config.optimizer.kind, config.optimizer.momentum) == (7, "sgd", 0.5)
    assert config.optimizer.lr == METHODS["FTAll"].defaults["optimizer.lr"]
    assert config.pet.kind == "all"
    assert load_config(path, ["optimizer.lr=0.25"]).optimizer.lr == 0.25


def test_all_problems_are_reported_together(tmp_path):
    message = refused(tmp_path, "epochs: many\noptimizer: {lr: -1}\nbatchsize: 4\n", ["gate.kind=los"])
    assert "epochs: 'many' is not a whole number" in message
    assert "optimizer.lr: -1.0 is below the least allowed, 0.0" in message
    assert "batchsize: unknown key (did you mean 'loader.batch_size'?)" in message
    assert ("command line: gate.kind: 'los' is not one of none, loss, batch, unbiased, selective_backprop, infobatch, auto "
            "(did you mean 'loss'?)") in message
    assert len(message.splitlines()) == 4


def test_problems_of_every_kind_come_in_one_round_with_the_place_each_came_from(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("method: PETT\noptimizer: 3\ncache: {kind: features}\nproxies: {levels: [half]}\n")
    with pytest.raises(UserError) as caught:
        load_config(path, ["loader.augment=flip", "backend.name=onnx", "optimizer.lr=fast", "resume=false"])
    assert [line.partition("; write")[0] for line in str(caught.value).splitlines()] == [
        f"{path}: method: 'PETT' is not one of {', '.join(METHODS)} (did you mean 'PET'?)",
        f"{path}: optimizer: is a section",
        f"{path}: proxies.levels: 'half' is not a proxy",
        "command line: backend.name: 'onnx' is not one of auto, eager, channels_last, folded, bf16, torchscript, onnxruntime, "
        "openvino, openvino_bf16 (did you mean 'onnxruntime'?)",
        "command line: optimizer.lr: 'fast' is not a finite number",
        "command line: resume: 'false' is not one of auto, none",
        "command line: cache.kind=features keeps views of each image, loader.augment=flip asks for a fresh one each epoch; set how many "
        "to keep, such as cache.views=4"]


def test_a_refused_value_makes_no_further_problems(tmp_path):
    message = refused(tmp_path, "method: PET\n", ["cache.kind=feature"])
    assert message == "command line: cache.kind: 'feature' is not one of none, features, pixels, auto (did you mean 'features'?)"


def test_what_a_program_gives_is_not_called_the_command_line(tmp_path):
    assert refused(tmp_path, "", {"optimizer": {"lr": -1}}) == "overrides: optimizer.lr: -1.0 is below the least allowed, 0.0"


def test_short_name_of_a_key_is_recognised(tmp_path):
    assert "did you mean 'optimizer.lr'?" in refused(tmp_path, "lr: 0.1\n")


def test_contradiction_is_refused_in_the_methods_words(tmp_path):
    message = refused(tmp_path, "method: PET\ncache: {kind: features}\n")
    assert "config.yaml: cache.kind=features contradicts method PET, which stands for cache.kind=none" in message
    assert "as published" in message
    message = refused(tmp_path, "proxies: {levels: [160px]}\n", ["method=PET_fast"])
    assert "config.yaml: proxies.levels=[160px] contradicts command line: method=PET_fast, which stands for proxies.levels=[]" in message


@pytest.mark.parametrize("text, expected", [
    ("a: 1\na: 2\n", "given twice"), ("epochs: [1\n", "not valid YAML"), ("- 1\n", "holds a list"), ("optimizer: 3\n", "is a section"),
    ("a: &x [1]\nb: *x\n", "aliases"), ("epochs: true\n", "not a whole number"), ("optimizer: {lr: .nan}\n", "not a finite number"),
    ("optimizer: {lr: 1e999}\n", "not a finite number"), ("method: Ours\n", "'Ours' is not one of FTAll"),
    ("loader: {workers: some}\n", "is not auto or a number from 0 to 256"), ("overwrite: 1\n", "not true or false"),
    ("router: {kind: level:x}\n", "none, residual, policy, shuffled, importance, random or level:N"),
    ("1: a\n1: b\n", "key '1' is given twice"),
    ("true: a\ntrue: b\n", "key 'True' is given twice"), ("1: a\n'1': b\n", "key '1' is given twice"),
    ("optimizer: {lr: 1}\noptimizer.lr: 2\n", "optimizer.lr: is given twice"),
    ("data: 2024.10\n", "data: '2024.1' is not a text; write it in quotes"), ("data: ''\n", "data: is empty"),
    ("proxies: {levels: [160px, 0px]}\n", "'0px' is not a proxy; write PIXELSpx"), ("proxies: {levels: [160]}\n", "not a list of texts"),
    (f"optimizer: {{lr: 1{'0' * 400}}}\n", "...' is not a finite number"), (f"epochs: 0x{'f' * 5000}\n", "a huge number is above"),
    ("network: [a,\n  b]\n", "network: '['a', 'b']' is not a text"), ("method:\n", "'None' is not one of FTAll"),
])
def test_bad_files(tmp_path, text, expected):
    assert expected in refused(tmp_path, text)


def test_missing_file_is_named():
    with pytest.raises(UserError, match="nowhere.yaml: no such configuration"):
        load_config("nowhere.yaml")


def test_yaml_numbers_without_a_point_are_numbers(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("optimizer: {lr: 1e-2}\n")  # YAML 1.1 reads this as a text
    assert load_config(path).optimizer.lr == 0.01


def test_overrides_are_literals_or_texts():
    assert parse_overrides(["epochs=3", "data=My Folder", "overwrite=true", "proxies.levels=['160px']"]) == {
        "epochs": 3, "data": "My Folder", "overwrite": True, "proxies.levels": ["160px"]}
    with pytest.raises(UserError, match="write key=value"):
        parse_overrides(["epochs"])


@pytest.mark.parametrize("text, expected", [
    ("2024", "2024"), ("2024.10", "2024.10"), ("1e3", "1e3"), ("true", "true"), ("0x10", "0x10"), ("[a]", "[a]"), ("a=b", "a=b"),
    ("'my photos'", "my photos"), ('"none"', "none"), ("it's", "it's"), ("'a'-'b'", "'a'-'b'"), (" x", " x")])
def test_a_text_on_the_command_line_stays_as_it_is_written(text, expected):
    config = build_config({}, parse_overrides([f"data={text}", f"output={text}"]))
    assert (config.data, config.output) == (expected, expected)


@pytest.mark.parametrize("text", ["{[]:1}", "{}[0]", "(" * 500, "1" * 5000, "\\", "[1,", "b'", "1j", "'\\d'", "1if 2else 3"])
@pytest.mark.filterwarnings("error")
def test_what_is_no_number_is_refused_in_words(text):
    with pytest.raises(UserError, match="epochs: .* is not a whole number"):
        build_config({}, parse_overrides([f"epochs={text}"]))


def test_none_is_a_word_where_it_is_a_choice():
    config = build_config({}, parse_overrides(["resume=none", "gate.kind=none", "cache.kind=None", "router.kind=none", "output=None"]))
    assert (config.resume, config.gate.kind, config.cache.kind, config.router.kind, config.output) == ("none", "none", "none", "none", None)
    assert build_config({}, {"router.kind": None, "output": None}).router.kind == "none"
    assert build_config({}, parse_overrides(["data=none"])).data == "none"


def test_paths_begin_at_home_where_they_say_so(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = build_config({"network": "~/net.safetensors"}, parse_overrides(["output=~/runs/~a"]))
    assert (config.network, config.output) == ("/home/someone/net.safetensors", "/home/someone/runs/~a")
    assert build_config({}, {"output": Path("res") / "x"}).output == os.path.join("res", "x")


def test_the_backends_are_those_that_there_are():
    from piebridge.core.backends.registry import BACKENDS

    assert BACKEND_NAMES == tuple(BACKENDS)


def test_every_key_is_described():
    assert [row[0] for row in describe_keys()] == list(known_keys())
    assert all(text for _, _, text in describe_keys())


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_makes_a_configuration(method):
    config = build_config({"method": method}, {})
    for key, value in METHODS[method].fixed.items():
        section, _, name = key.rpartition(".")
        assert getattr(getattr(config, section) if section else config, name) == value


@pytest.mark.parametrize("overrides, expected", [
    (["cache.kind=features", "loader.augment=flip"], "keeps views of each image"),
    (["cache.kind=pixels", "loader.augment=flip"], "cache.kind=pixels keeps views of each image"),
    (["cache.views=3"], "cache.views=3: loader.augment=none shows one view of each image; use cache.views=0, or augment"),
    (["cache.augment=noise", "cache.kind=pixels"], "cache.augment=noise changes cached features, and cache.kind=pixels keeps none"),
    (["cache.augment=mixup", "cache.augment_strength=1.5"], "the weight of the other sample in a mixup is at most 1"),
    (["cache.budget=much"], "cache.budget: 'much' is not a size; write for example 512MiB or 2GiB"),
    (["router.kind=level:2", "proxies.levels=[]"], "asks for a proxy, and there is none; give proxies.levels or proxies.set"),
    (["pet.kind=all"], "pet.kind=all trains the whole network, method ours a part of it; use method=FTAll"),
    (["step=elastic"], "step=elastic is a step of the whole network; use pet.kind=all, not head"),
    (["pet.head_first=3"], "pet.head_first=3: pet.kind=head trains nothing but a head; use pet.head_first=0"),
    (["pet.head_first=3", "pet.kind=lora", "step=eager", "strategy=auto"], "pet.head_first=3: strategy=auto says itself what a run does"),
    (["pet.head_first=3", "pet.kind=lora", "step=eager", "stream.samples=9"], "the head sees all images several times"),
    (["pet.head_first=3", "pet.kind=lora", "step=eager", "pseudo.kind=confidence", "splits.shots=3"],
     "images without labels have none for the head"),
    (["step=prune_train", "pet.kind=lora"], "step=prune_train is a step of the whole network; use pet.kind=all, not lora"),
    (["pet.kind=all", "method=PET"], "method PET a part of it; use method=FTAll"),
    (["proxies.bridge=set"], "proxies.bridge=set takes the maps of a proxy set, and there is none; give proxies.set=FOLDER, or use "
     "proxies.bridge=fitted"),
    (["router.kind=level:1", "proxies.levels=[]"], "router.kind=level:1 asks for a proxy, and there is none; give proxies.levels or"),
    (["splits.shots=3", "pseudo.kind=confidence", "optimizer.label_smoothing=0.0", "cache.augment=mixup"], "cache.augment=mixup mixes "
     "samples of one class, and that of the unlabelled ones is not known; use cache.augment=noise"),
    (["splits.shots=3", "pseudo.kind=confidence", "optimizer.label_smoothing=0.0", "epochs=3"], "pseudo.warmup_epochs=3: epochs=3 end "
     "before the first image gets a label"),
])
def test_settings_that_cannot_hold_together(tmp_path, overrides, expected):
    assert expected in refused(tmp_path, "method: ours\n", overrides)


@pytest.mark.parametrize("given, lines", [
    ({}, []),
    ({"pet.r": 16}, ["pet.r=16 has no effect: it is read with pet.kind=adapter|lora|lst, not head"]),
    ({"gate.drop": 0.3, "gate.kind": "loss"}, ["gate.drop=0.3 has no effect: it is read with gate.kind=unbiased|infobatch, not loss"]),
    ({"gate.full_epochs": 0.5, "gate.kind": "unbiased"}, []),
    ({"cache.folder": "rows"}, ["cache.folder=rows has no effect: it is read with cache.shared=True, not False"]),
    ({"router.kind": "policy", "proxies.set": "set", "router.delta": 0.2}, ["router.delta=0.2 has no effect: it is read with router.kind="
                                                                           "residual|random, not policy"]),
    ({"strategy": "auto", "cache.kind": "pixels", "router.kind": "none", "router.delta": 0.2}, ["cache.kind=pixels has no effect: "
                                                                                               "strategy=auto chooses it"]),
    ({"elastic.rho": 0.2, "optimizer.momentum": 0.5}, ["optimizer.momentum=0.5 has no effect: it is read with optimizer.kind=sgd, not "
                                                       "adamw",
                                                       "elastic.rho=0.2 has no effect: it is read with step=elastic, not direct"])])
def test_settings_that_nothing_reads_are_named(given, lines):
    assert list(unread(build_config(given, {}))) == lines


def test_no_shipped_configuration_sets_what_nothing_reads():
    for name, path in list_configs().items():
        assert not list(unread(build_config(read_yaml(path), {}))), name


def test_the_papers_strategy_and_its_ablations():
    config = build_config({"strategy": "paper", "proxies.set": "set"}, {})
    assert (config.router.kind, config.gate.kind, config.gate.momentum, config.cache.kind) == ("policy", "loss", 0.8, "none")
    assert (config.proxies.use, config.proxies.bridge, config.proxies.loading) == ("all", "set", "double_buffer")
    without_gate = build_config({"strategy": "paper", "proxies.set": "set", "method": "no_gate"}, {})
    assert (without_gate.router.kind, without_gate.gate.kind) == ("policy", "none")


@pytest.mark.parametrize("method, kind, factor, step", [("ours", "head", 0.8, "eager"), ("PET", "head", -1.0, "eager"),
                                                        ("ours", "adapter", 0.8, "fresh_adam")])
def test_as_released_the_baseline_is_the_routed_path_with_an_open_gate(method, kind, factor, step):
    config = build_config({"method": method, "pet.kind": kind, "as_released": True, "proxies.set": "set"}, {})
    assert (config.router.kind, config.gate.kind, config.gate.factor, config.step) == ("policy", "batch", factor, step)
    assert config.gate.momentum == pytest.approx(9 / 11)  # 1 - 2 / (10 + 1)
    assert (config.loader.augment, config.cache.kind, config.splits.val_fraction) == ("none", "none", 0.0)
    rule = config.optimizer
    assert (rule.kind, rule.momentum, rule.weight_decay, rule.schedule, rule.label_smoothing) == ("sgd", 0.0, 0.0, "constant", 0.0)


@pytest.mark.parametrize("overrides, expected", [
    (["strategy=paper"], "router.kind=policy asks the policy of a proxy set; give proxies.set=FOLDER"),
    (["strategy=paper", "proxies.set=s", "gate.kind=none"], "gate.kind=none contradicts strategy=paper, which stands for gate.kind=loss"),
    (["strategy=paper", "method=PET"], "strategy=paper trains through proxies, method PET stands for none; use method=ours"),
    (["as_released=true", "proxies.set=s", "strategy=paper"], "as_released=true does as the artifact does, strategy=paper does not"),
    (["as_released=true", "method=PET_fast"], "as_released=true: the artifact has ours, PET, FTAll, and not PET_fast"),
    (["as_released=true", "proxies.set=s", "loader.augment=flip"], "loader.augment=flip contradicts as_released=true, which stands for "
     "loader.augment=none: the released artifact's ours"),
    (["method=no_alignment", "proxies.set=s", "router.predictor=set"], "router.predictor=set reads features that a set's map has brought "
     "to the original's, and proxies.bridge=none leaves the map out; use router.predictor=device"),
    (["as_released=true", "proxies.set=s", "method=PET", "gate.factor=0.8"], "gate.factor=0.8 contradicts as_released=true"),
])
def test_strategies_that_contradict_something(overrides, expected):
    with pytest.raises(UserError) as caught:
        build_config({}, parse_overrides(overrides))
    assert expected in str(caught.value)


@pytest.mark.parametrize("text", ["epochs: !!int ''\n", "epochs: !!float ''\n", "overwrite: !!bool maybe\n", "a: !!timestamp x\n"])
def test_values_that_a_yaml_tag_cannot_take_are_one_line(tmp_path, text):
    assert "not valid YAML" in refused(tmp_path, text)


@pytest.mark.parametrize("override, expected", [
    ("optimizer.lr=1e300", "above the most allowed"), ("proxies.levels=['1px']", "is not a proxy"), ("output=a\0b", "null character"),
    ("router.kind=level:\u00b2", "none, residual, policy, shuffled, importance, random or level:N"),
    ("proxies.levels=['" + "9" * 5000 + "px']", "is not a proxy"),
    ("pet.blocks=last:\u00b2", "is not all, last:N, or a list of names"), ("pet.blocks=last:", "is not all, last:N"),
    ("pet.blocks=last:0", "is not all, last:N"), ("pet.blocks=last:-1", "is not all, last:N"),
    ("cache.budget=" + "9" * 5000, "is not a size"), ("plan.ram=" + "9" * 400 + "GiB", "is not a size"),
    ("splits.seed=" + "9" * 40, "above the most allowed")])
def test_extreme_overrides(tmp_path, override, expected):
    assert expected in refused(tmp_path, "method: ours\n", [override])
