"""What is known of one layer of a network."""

from dataclasses import dataclass
from typing import Optional, Tuple

POINTWISE, DEPTHWISE, CONV, LINEAR = "1x1", "depthwise", "conv", "linear"
NORM, EMBEDDING, PARAMETER = "norm", "embedding", "parameter"
TRUNK = (POINTWISE, DEPTHWISE, CONV, LINEAR)  # what "last 5 layers" counts
CONVOLUTIONS = (POINTWISE, DEPTHWISE, CONV)


@dataclass(frozen=True)
class Attention:
    """number: of this attention, in order of execution; heads: of its queries; size: features of each."""

    number: int
    heads: int
    size: int


@dataclass(frozen=True)
class Layer:
    """path: of the module, or of a parameter without one (of a joint projection "....in_proj"). kind: POINTWISE ... PARAMETER.

    weight, bias: state dict keys. shape: of the weight. cut: the weight's dimension along which a part is taken, None where it can only
    be trained whole: the input channels; of convolutions in groups the output channels, in whole groups. groups: of a convolution.
    input_shape, output_shape, input_bytes, macs: for the example. block: path of the block. role: "attention in", "attention out",
    "mlp" or "". is_tied: the weight is used in more than one place, or has more than one name. is_added: a LoRA factor or adapter.
    """

    path: str
    kind: str
    weight: Optional[str]
    bias: Optional[str]
    shape: Tuple[int, ...] = ()
    cut: Optional[int] = None
    groups: int = 1
    input_shape: Tuple[int, ...] = ()
    output_shape: Tuple[int, ...] = ()
    input_bytes: int = 0
    macs: int = 0
    block: Optional[str] = None
    role: str = ""
    attention: Optional[Attention] = None
    is_tied: bool = False
    is_added: bool = False
    is_head: bool = False

    @property
    def output_dim(self):
        """The weight's dimension of output channels: 1 where it is stored [in, out]."""
        return 1 if self.cut == 0 and self.groups == 1 else 0
