"""The GPU's time to unpack tensors, as a whole or in the pieces that small slots hold. Pure.

Unpacking and multiplying share the GPU, so their times add up, as they did when measured
(docs/decisions/0025-packed-weights.md).
"""

from probes.placement.models.description import TensorDescription
from probes.placement.packing.estimate import DENSE_FROM
from probes.placement.planner.costs.blockbytes import packed_bytes
from probes.placement.planner.costs.oneblock import OneBlock


def unpack_s(one: OneBlock, tensor: TensorDescription, *, dense: bool, parts: int = 1) -> float:
    """Seconds for one tensor in so many parts, or for its copy where it isn't packed.

    Kernels write the dtype that was packed; operations convert.
    """
    machine = one.machine
    packed = packed_bytes(tensor, dense=dense)
    moved = packed + tensor.n_bytes
    items = parts * machine.unpack_item_s
    if packed >= tensor.given_bytes:
        return items + moved / machine.vram_rate
    if one.converts:
        return items + moved / machine.operations_rate
    ranked = (dense and tensor.numbers >= DENSE_FROM) or tensor.dtype == "float16"
    return items + moved / (machine.ranked_rate if ranked else machine.unpack_rate)


def cut(one: OneBlock, room: int, *, dense: bool) -> list[tuple[float, float]]:
    """Bytes of each piece and seconds of its unpacking, as the runtime cuts it for slots of `room`.

    A tensor that is larger than a slot is cut into equal parts. Neighbours that fit a slot together are
    one piece, so a piece may be much smaller than a slot.
    """
    made: list[tuple[float, float]] = []
    for tensor in one.block.tensors:
        packed = packed_bytes(tensor, dense=dense)
        count = -(-packed // room)
        unpack = unpack_s(one, tensor, dense=dense, parts=count)
        for _ in range(count):
            if made and made[-1][0] + packed / count <= room:
                before = made.pop()
                made.append((before[0] + packed / count, before[1] + unpack / count))
            else:
                made.append((packed / count, unpack / count))
    return made
