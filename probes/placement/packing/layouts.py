"""The layouts: how the bits of a weight are divided when it is packed.

A weight has a sign and a mantissa, which are noise, and an exponent, which in trained and in Gaussian weights
takes few values. So sign and mantissa are stored as they are, and the exponent as a code of 3 or 4 bits.

==========  ==================  ====  =======================================================================
layout      dtype               bits  exponent
==========  ==================  ====  =======================================================================
``b12``     bfloat16            12    4-bit code: base + code; code 0 is zero; escapes in a list
``f28``     float32             28    the same, with 24 bits of sign and mantissa
``b11``     bfloat16            11    3-bit code of a table; code 0 is an escape, whose exponent is elsewhere
``h14``     float16             14    the same, with 11 bits of sign and mantissa
``b12f32``  float32             12    `b12`, for weights whose low 16 bits are all zero
``h14f32``  float32             14    `h14`, for weights that were float16 once
``bf16``    bfloat16            16    as it is, for weights that are converted before each call
==========  ==================  ====  =======================================================================
"""

from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True)
class Layout:
    """How tensors of `dtype` are packed: as `via`, the same dtype or a narrower one that holds the values."""

    name: str
    dtype: torch.dtype
    via: torch.dtype
    coded_bits: int  # of an exponent's code: 4 with a list of escapes, 3 with a table, 8 as it is

    @property
    def word(self) -> torch.dtype:
        """The integer as wide as `via`."""
        return torch.int32 if self.via is torch.float32 else torch.int16

    @property
    def sign_shift(self) -> int:
        """Where the sign's bit is."""
        return 31 if self.word is torch.int32 else 15

    @property
    def exponent_bits(self) -> int:
        """Bits of an exponent."""
        return 5 if self.via is torch.float16 else 8

    @property
    def mantissa_bits(self) -> int:
        """Bits of a mantissa."""
        return self.sign_shift - self.exponent_bits


B12: Final = Layout("b12", torch.bfloat16, torch.bfloat16, 4)
F28: Final = Layout("f28", torch.float32, torch.float32, 4)
B11: Final = Layout("b11", torch.bfloat16, torch.bfloat16, 3)
H14: Final = Layout("h14", torch.float16, torch.float16, 3)
B12F32: Final = Layout("b12f32", torch.float32, torch.bfloat16, 4)
H14F32: Final = Layout("h14f32", torch.float32, torch.float16, 3)
BF16: Final = Layout("bf16", torch.bfloat16, torch.bfloat16, 8)
LAYOUTS: Final = {layout.name: layout for layout in (B12, F28, B11, H14, B12F32, H14F32, BF16)}
