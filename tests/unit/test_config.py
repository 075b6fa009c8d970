"""Configuration: what is read, what is refused, and in which words."""

import pytest

from piebridge.config import build_config, describe_keys, known_keys, load_config, parse_overrides
from piebridge.core.errors import UserError
from piebridge.core.methods import METHODS


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
    assert "command line: gate.kind: 'los' is not one of none, loss, auto (did you mean 'loss'?)" in message
    assert len(message.splitlines()) == 4


def test_short_name_of_a_key_is_recognised(tmp_path):
    assert "did you mean 'optimizer.lr'?" in refused(tmp_path, "lr: 0.1\n")


def test_contradiction_is_refused_in_the_methods_words(tmp_path):
    message = refused(tmp_path, "method: PET\ncache: {kind: features}\n")
    assert "cache.kind=features contradicts method PET" in message and "as published" in message


@pytest.mark.parametrize("text, expected", [
    ("a: 1\na: 2\n", "given twice"), ("epochs: [1\n", "not valid YAML"), ("- 1\n", "holds a list"), ("optimizer: 3\n", "is a section"),
    ("a: &x [1]\nb: *x\n", "aliases"), ("epochs: true\n", "not a whole number"), ("optimizer: {lr: .nan}\n", "not a finite number"),
    ("optimizer: {lr: 1e999}\n", "not a finite number"), ("method: Ours\n", "'Ours' is not one of FTAll"),
    ("loader: {workers: some}\n", "is not auto or a number from 0 to 256"), ("overwrite: 1\n", "not true or false"),
    ("router: {kind: level:x}\n", "none, residual, random or level:N"),
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


def test_none_is_a_word_where_it_is_a_choice():
    config = build_config({}, parse_overrides(["resume=none", "gate.kind=none", "cache.kind=None"]))
    assert (config.resume, config.gate.kind, config.cache.kind) == ("none", "none", "none")


def test_every_key_is_described():
    assert [row[0] for row in describe_keys()] == list(known_keys())
    assert all(text for _, _, text in describe_keys())


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_makes_a_configuration(method):
    config = build_config({"method": method}, {})
    for key, value in METHODS[method].fixed.items():
        section, _, name = key.partition(".")
        assert getattr(getattr(config, section), name) == value


@pytest.mark.parametrize("overrides, expected", [
    (["cache.kind=features", "loader.augment=flip"], "keeps one view of each image"),
    (["pet.kind=all", "cache.kind=features"], "freezes none"),
    (["pet.kind=all"], "use method=FTAll"),
])
def test_settings_that_cannot_hold_together(tmp_path, overrides, expected):
    assert expected in refused(tmp_path, "method: ours\n", overrides)
