"""The forge from Python: a module of one's own, and what cannot be forged."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from piebridge.core.errors import UserError
from piebridge.core.proxy_set import load_proxy_set
from piebridge.forge import forge
from piebridge.forge_settings import ForgeSettings, forge_settings

CLIPART = Path(__file__).resolve().parents[2] / "datasets" / "Clipart10"
models = pytest.importorskip("torchvision.models")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    for name in ("arrows", "flags", "fruit", "mammals"):
        for path in sorted((CLIPART / name).iterdir())[:10]:
            shutil.copy(str(path), str(folder / f"{name} {path.name}"))
    return folder


class Undecided(nn.Module):
    """Its course depends on its values, so no trace of it is the whole of it."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        x = x.mean((2, 3))
        return self.head(x if x.sum() > 0 else -x)


def test_a_module_of_ones_own(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("PIEBRIDGE_CACHE", str(tmp_path / "profile"))
    torch.manual_seed(0)
    module = models.mobilenet_v3_small(weights=None, num_classes=4).eval()
    settings = forge_settings({"levels": 2, "least": 0.95, "images": 24, "held_out": 12, "widths": 1, "narrowest": 0.8,
                               "resolutions": "96,64", "precisions": "float", "drops": 0, "policy": False})
    proxy_set = load_proxy_set(forge(module, photos, tmp_path / "set", settings))
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(proxy_set.original(images), module(images), rtol=1e-4, atol=1e-5)
    assert 1 <= len(proxy_set.proxies) <= 2 and proxy_set.policy is None
    for proxy in proxy_set.proxies:
        after = proxy.facts["alignment"]["after"]
        assert all(0 <= each["relative_error"] < 2 and -1 <= each["cosine"] <= 1.0001 for each in after.values())


@pytest.mark.parametrize("make, text", [(Undecided, "Undecided"), (lambda: nn.Linear(3, 2), "Linear")])
def test_what_cannot_be_captured_is_refused(make, text, photos, tmp_path):
    with pytest.raises(UserError, match=text):
        forge(make(), photos, tmp_path / "set", ForgeSettings())
    assert not (tmp_path / "set").exists() and not (tmp_path / "set.work").exists()


def test_every_wrong_setting_is_told_at_once():
    with pytest.raises(UserError) as error:
        forge_settings(["levels=0", "precisions=int4,float", "aling=closed", "resolutions=192,x"])
    assert len(str(error.value).splitlines()) == 4
    assert "aling: unknown key (did you mean 'align'?); `piebridge forge --help` lists them" in str(error.value)
    assert forge_settings(["resolutions=192,160", "policy=false"]).resolutions == ("192", "160")
