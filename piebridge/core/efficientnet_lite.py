"""EfficientNet-Lite0 (Tan and Le 2019, without squeeze-and-excitation and with ReLU6), as plain modules.

The names of the modules, and so the 296 keys of the state dict, are those of timm's `tf_efficientnet_lite0`. The published
weights come from TensorFlow, whose "SAME" padding is asymmetric before a convolution of stride 2 on an even size: one row and
column more at the end than at the start. The padding here is static (right for even sizes, a shift of one pixel at odd ones), so
the graph is the same at every resolution.
"""

from torch import nn

BATCH_NORM_EPS = 1e-3
# (expansion, kernel, stride, output channels, repeats) of each stage
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
STEM_CHANNELS = 32
HEAD_CHANNELS = 1280


def _batch_norm(channels):
    return nn.BatchNorm2d(channels, eps=BATCH_NORM_EPS)


def _same_padding(kernel, stride):
    """(module, padding of the convolution): TensorFlow's "SAME" on even sizes."""
    if stride == 1:
        return nn.Identity(), kernel // 2
    before = (kernel - 2) // 2
    after = kernel - 2 - before
    return nn.ZeroPad2d((before, after, before, after)), 0


class DepthwiseSeparable(nn.Module):
    """Depthwise 3x3, then pointwise: the first block, which does not expand. [N,C,H,W] -> [N,out,H,W]."""

    def __init__(self, channels, out_channels, kernel):
        super().__init__()
        self.conv_dw = nn.Conv2d(channels, channels, kernel, padding=kernel // 2, groups=channels, bias=False)
        self.bn1 = _batch_norm(channels)
        self.act1 = nn.ReLU6(inplace=True)
        self.conv_pw = nn.Conv2d(channels, out_channels, 1, bias=False)
        self.bn2 = _batch_norm(out_channels)

    def forward(self, x):
        x = self.act1(self.bn1(self.conv_dw(x)))
        return self.bn2(self.conv_pw(x))


class InvertedResidual(nn.Module):
    """Expand, depthwise, project; plus the input where shapes allow. [N,C,H,W] -> [N,out,H/stride,W/stride]."""

    def __init__(self, channels, out_channels, kernel, stride, expansion):
        super().__init__()
        wide = channels * expansion
        self.has_skip = stride == 1 and channels == out_channels
        self.conv_pw = nn.Conv2d(channels, wide, 1, bias=False)
        self.bn1 = _batch_norm(wide)
        self.act1 = nn.ReLU6(inplace=True)
        self.pad, padding = _same_padding(kernel, stride)
        self.conv_dw = nn.Conv2d(wide, wide, kernel, stride=stride, padding=padding, groups=wide, bias=False)
        self.bn2 = _batch_norm(wide)
        self.act2 = nn.ReLU6(inplace=True)
        self.conv_pwl = nn.Conv2d(wide, out_channels, 1, bias=False)
        self.bn3 = _batch_norm(out_channels)

    def forward(self, x):
        y = self.act1(self.bn1(self.conv_pw(x)))
        y = self.act2(self.bn2(self.conv_dw(self.pad(y))))
        y = self.bn3(self.conv_pwl(y))
        return x + y if self.has_skip else y


class EfficientNetLite0(nn.Module):
    """[N,3,H,W], normalised with mean 0.5 and deviation 0.5 -> logits [N,classes]."""

    def __init__(self, classes=1000):
        super().__init__()
        self.pad, padding = _same_padding(3, 2)
        self.conv_stem = nn.Conv2d(3, STEM_CHANNELS, 3, stride=2, padding=padding, bias=False)
        self.bn1 = _batch_norm(STEM_CHANNELS)
        self.act1 = nn.ReLU6(inplace=True)
        stages, channels = [], STEM_CHANNELS
        for expansion, kernel, stride, out_channels, repeats in STAGES:
            blocks = []
            for index in range(repeats):
                if expansion == 1:
                    blocks.append(DepthwiseSeparable(channels, out_channels, kernel))
                else:
                    blocks.append(InvertedResidual(channels, out_channels, kernel, stride if index == 0 else 1, expansion))
                channels = out_channels
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        self.conv_head = nn.Conv2d(channels, HEAD_CHANNELS, 1, bias=False)
        self.bn2 = _batch_norm(HEAD_CHANNELS)
        self.act2 = nn.ReLU6(inplace=True)
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(HEAD_CHANNELS, classes)
        self._initialise()

    def _initialise(self):
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
                nn.init.normal_(module.weight, std=(2.0 / fan_out) ** 0.5)

    def forward(self, x):
        x = self.act1(self.bn1(self.conv_stem(self.pad(x))))
        x = self.blocks(x)
        x = self.act2(self.bn2(self.conv_head(x)))
        x = self.global_pool(x).flatten(1)
        return self.classifier(x)
