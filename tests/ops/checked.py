"""The public ops with the shapes and types of their signatures checked at every call."""

from beartype import beartype
from jaxtyping import jaxtyped

from multilin.ops import block_outer as products_op
from multilin.ops import causal_mixing as mixing_op
from multilin.ops import int8 as int8_op
from multilin.ops import linear_cross_entropy as loss_op
from multilin.ops import linear_recurrence as recurrence_op
from multilin.ops import prefix_softmax as pooling_op
from multilin.ops import rotary as rotary_op
from multilin.ops import tile_norm as norm_op
from multilin.ops import windowed_attention as attention_op

_checked = jaxtyped(typechecker=beartype)

block_outer = _checked(products_op.block_outer)
causal_mixing = _checked(mixing_op.causal_mixing)
windowed_attention = _checked(attention_op.windowed_attention)
prefix_softmax = _checked(pooling_op.prefix_softmax)
linear_recurrence = _checked(recurrence_op.linear_recurrence)
linear_cross_entropy = _checked(loss_op.linear_cross_entropy)
token_cross_entropy = _checked(loss_op.token_cross_entropy)
int8_linear = _checked(int8_op.int8_linear)
int8_block_outer = _checked(int8_op.int8_block_outer)
quantize = _checked(int8_op.quantize)
tile_norm = _checked(norm_op.tile_norm)
rotary = _checked(rotary_op.rotary)
