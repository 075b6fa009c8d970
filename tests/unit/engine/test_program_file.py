"""Program files: written and read they train to the same bits; hostile ones are refused in one line, and run nothing."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program_examples import batches, network, program_of, some_channels

from piebridge.core.errors import UserError
from piebridge.core.safetensors_file import read_header, read_safetensors, write_safetensors
from piebridge.engine.program import StepProgram
from piebridge.engine.program_file import _hash
from piebridge.engine.update_rules import AdamW

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("options", [{}, {"is_training": True, "accumulation": 2}, {"clip": 1.0, "is_channels_last": True}],
                         ids=["plain", "training", "channels last"])
def test_a_read_program_trains_to_the_same_bits(tmp_path, options):
    module, data = network(dropout=0.3), batches(6)
    program = program_of(module, AdamW(), some_channels(), seed=5, **options).write(tmp_path / "program.safetensors")
    read = StepProgram.read(tmp_path / "program.safetensors")
    assert read.facts == program.facts and read.batch_size == program.batch_size
    for batch in data[:3]:
        assert torch.equal(program(*batch)[0], read(*batch)[0])
    program.write_state(tmp_path / "state.safetensors")
    resumed = StepProgram.read(tmp_path / "program.safetensors").read_state(tmp_path / "state.safetensors")
    for batch in data[3:]:
        assert torch.equal(program(*batch)[1], resumed(*batch)[1])
    for name, tensor in program.state().items():
        assert torch.equal(tensor, resumed.state()[name]), name


def test_the_same_program_gives_the_same_bytes(tmp_path):
    for name in "ab":
        program_of(network(), parts=some_channels()).write(tmp_path / name)
    StepProgram.read(tmp_path / "a").write(tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert set(read_header(tmp_path / "a").entries) == set(read_header(tmp_path / "c").entries)


def test_the_file_says_what_is_in_it(tmp_path):
    program_of(network(), AdamW(), some_channels()).write(tmp_path / "program")
    tensors, metadata = read_safetensors(tmp_path / "program")
    content = json.loads(metadata["program"])
    assert metadata["format"] == "piebridge step program" and len(metadata["hash"]) == 64
    assert content["parts"] == {"5.weight": 1, "3.weight": 0, "9.weight": 0, "9.bias": None}
    assert content["state"]["state/9.bias/mean"] == {"dtype": "float64", "shape": [5]}
    assert tensors["index/5.weight"].tolist() == [1, 4, 6] and "trained/9.bias" in tensors and "frozen/0.weight" in tensors
    assert not any(name.startswith("state/") for name in tensors)


def test_the_state_file_is_small(tmp_path):
    program_of(network(), parts=some_channels()).write(tmp_path / "program").write_state(tmp_path / "state")
    names = {"trained/5.weight", "trained/3.weight", "trained/9.weight", "trained/9.bias", "step_count"}
    assert set(read_header(tmp_path / "state").entries) == names


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(content, tensors) of a program file, to be changed."""
    path = tmp_path_factory.mktemp("program") / "program"
    program_of(network(), parts=some_channels()).write(path)
    tensors, metadata = read_safetensors(path)
    return metadata["program"], tensors


def rewrite(path, text, tensors, **metadata):
    """A program file with a right hash, unless another is given."""
    written = {"format": "piebridge step program", "version": "1", "program": text, "hash": _hash(text, tensors)}
    write_safetensors(path, tensors, dict(written, **metadata))
    return path


def altered(path, written, edit):
    content, tensors = json.loads(written[0]), dict(written[1])
    edit(content, tensors)
    return rewrite(path, json.dumps(content), tensors)


def call(content, operator):
    return next(each for each in content["graphs"]["update"]["calls"] if each[1] == operator)


def set_operator(name):
    def edit(content, tensors):
        call(content, "aten.neg.default")[1] = name
    return edit


def refer_forward(content, tensors):
    calls = content["graphs"]["update"]["calls"]
    calls[0][2][0] = "%" + calls[5][0]


def refer_to_itself(content, tensors):
    calls = content["graphs"]["update"]["calls"]
    calls[0][2][0] = "%" + calls[0][0]


def define_twice(content, tensors):
    calls = content["graphs"]["update"]["calls"]
    calls[1][0] = calls[0][0]


def ask_for_memory(content, tensors):
    content["graphs"]["update"]["calls"].insert(0, ["huge", "aten.full.default", [[1 << 30, 1 << 20], 1.0], {}])


def huge_input(content, tensors):
    next(each for each in content["graphs"]["update"]["inputs"] if each["role"] == "batch")["shape"] = [4, 3, 1 << 30, 1 << 30]


def wrong_shape(content, tensors):
    tensors["frozen/0.weight"] = torch.zeros(8, 3, 5, 5).double()


def wrong_arity(content, tensors):
    call(content, "aten.neg.default")[2].append(3)


def channel_out_of_range(content, tensors):
    tensors["index/5.weight"] = torch.tensor([1, 4, 60])


def name_with_code(content, tensors):
    call(content, "aten.neg.default")[0] = "x); import os; print("


def keyword_with_code(content, tensors):
    call(content, "aten.neg.default")[3]["x=print(1), y"] = 1


def deep_arguments(content, tensors):
    value = []
    for _ in range(600):
        value = [value]
    call(content, "aten.neg.default")[2][0] = value


def no_losses(content, tensors):
    content["graphs"]["update"]["results"][0]["role"] = "outputs"


def other_result(content, tensors):
    content["graphs"]["update"]["results"][0]["shape"] = [5]


def other_state(content, tensors):
    content["graphs"]["update"]["results"][2]["name"] = "nowhere"


HOSTILE = {
    "operator of python": (set_operator("os.system"), "it calls the operator 'os.system', which is unknown"),
    "operator not listed": (set_operator("aten.from_file.default"), "it calls the operator 'aten.from_file.default', which is unknown"),
    "operator misspelt": (set_operator("aten.negg.default"), r"'aten.negg.default', which is unknown \(did you mean"),
    "overload": (set_operator("aten.neg.__class__"), "'aten.neg.__class__', which this PyTorch does not have"),
    "in place": (set_operator("aten.abs.out"), "which writes into its arguments"),
    "operator of a number": (set_operator(7), "it calls the operator 7, which is unknown"),
    "forward reference": (refer_forward, r"the arguments of call 0 \(.*\) refer to '.*', which is not defined before"),
    "cycle": (refer_to_itself, "which is not defined before"),
    "defined twice": (define_twice, "it defines '.*' twice"),
    "missing frozen tensor": (lambda content, tensors: tensors.pop("frozen/0.weight"), "its frozen tensor '0.weight' is missing"),
    "missing trained tensor": (lambda content, tensors: tensors.pop("trained/5.weight"), "the tensors of '5.weight', .* are missing"),
    "missing channels": (lambda content, tensors: tensors.pop("index/5.weight"), "the tensors of '5.weight', .* are missing"),
    "channel out of range": (channel_out_of_range, "the channels of '5.weight' are not ascending numbers below 8"),
    "shape of a tensor": (wrong_shape, r"its frozen tensor '0.weight' is torch.float64 \[8, 3, 5, 5\] where the graph takes"),
    "huge value": (ask_for_memory, "would take more than 64 GiB"),
    "huge input": (huge_input, r"has the shape .*, more than 64 GiB"),
    "arity": (wrong_arity, "aten.neg.default"),
    "name with code": (name_with_code, "has the name 'x\\); import os"),
    "keyword with code": (keyword_with_code, "have a keyword that is no name"),
    "nested arguments": (deep_arguments, "nested too deeply|aten.neg.default"),
    "no losses": (no_losses, "its results are not one of losses and one of outputs"),
    "another result": (other_result, r"its losses 'losses' is not torch.float64 \[5\]"),
    "another state": (other_state, "'nowhere' is put out and does not come in"),
    "other keys": (lambda content, tensors: content.update(code="print(1)"), "its program has other keys"),
    "no graph": (lambda content, tensors: content["graphs"].clear(), r"its graphs are \[\]"),
    "graph of text": (lambda content, tensors: content["graphs"].update(update="x"), "its graph has other keys"),
}


@pytest.mark.parametrize("edit, message", HOSTILE.values(), ids=HOSTILE)
def test_refuses_a_hostile_file(tmp_path, written, edit, message):
    path = altered(tmp_path / "program", written, edit)
    with pytest.raises(UserError, match=message) as raised:
        StepProgram.read(path)
    assert str(raised.value).startswith(f"{path}: ") and "\n" not in str(raised.value)


def test_refuses_what_is_no_program(tmp_path, written):
    text, tensors = written
    for name, metadata, message in [("other", {"format": "pt"}, "not a step program, its format is 'pt'"),
                                    ("newer", {"version": "9"}, "has version '9', and this reads 1"),
                                    ("hash", {"hash": "0" * 64}, "its content is not what its hash was made of: it was damaged")]:
        with pytest.raises(UserError, match=f"{name}: {message}"):
            StepProgram.read(rewrite(tmp_path / name, text, tensors, **metadata))
    with pytest.raises(UserError, match="its program is no JSON"):
        StepProgram.read(rewrite(tmp_path / "text", "print(1)", tensors))
    with pytest.raises(UserError, match="no such file"):
        StepProgram.read(tmp_path / "nothing")
    with pytest.raises(UserError, match="not the state of a step program"):
        program_of(network()).read_state(tmp_path / "other")


def test_refuses_a_changed_tensor(tmp_path, written):
    text, tensors = written
    changed = dict(tensors, **{"frozen/0.weight": tensors["frozen/0.weight"] + 1})
    path = rewrite(tmp_path / "program", text, changed, hash=_hash(text, tensors))
    with pytest.raises(UserError, match="it was damaged or altered"):
        StepProgram.read(path)


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.sampled_from(["%x", "aten.neg.default", "batch", "float64"])
KEYS = st.sampled_from(["dtype", "text", "role", "name"])
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2), max_leaves=4)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_change_of_the_graph_is_read_or_refused(tmp_path, written, data):
    def edit(content, tensors):
        place = content["graphs"]["update"]
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.integers(0, 3)) == 0:
                place[key] = data.draw(JSON)
                return
            place = place[key]

    path = altered(tmp_path / "program", written, edit)
    try:
        StepProgram.read(path)
    except UserError as error:
        assert "\n" not in str(error)
