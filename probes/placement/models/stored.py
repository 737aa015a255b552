"""What a model consists of, from the names and shapes in its safetensors files. Pure.

A header says nothing of the order of calls, of attention or of ties: names suggest them. A config.json beside
the files says them, and its facts are taken if it has the same blocks.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from probes.placement.models.description import (
    BlockDescription,
    ModelDescription,
    TensorDescription,
    Use,
    block_name,
)
from probes.placement.models.headers import DTYPES, StoredTensor

_TABLE: Final = re.compile(r"(^|[._])(embed\w*|wte|wpe|word_embeddings|\w+_embeddings?|shared)\.weight$")
_FIRST: Final = re.compile(
    r"embed|wte|wpe|^shared|conv_in|patch|stem|time_|x_embedder|context_embedder", re.IGNORECASE
)
_NORM: Final = re.compile(r"(^|\.)(final_\w*norm\w*|ln_f|norm|norm_out|conv_norm_out)$", re.IGNORECASE)
_LAST: Final = re.compile(
    r"lm_head|embed_out|^head|classifier|pooler|conv_out|proj_out|project_out", re.IGNORECASE
)
_DIGITS: Final = re.compile(r"(\d+)")


def described(
    stored: Iterable[StoredTensor], *, name: str, source: str, known: ModelDescription | None = None
) -> ModelDescription:
    """The model of these tensors; `known` is what the config.json beside them says."""
    groups: dict[str, list[TensorDescription]] = {}
    for tensor in stored:
        made = TensorDescription(tensor.name, tensor.shape, DTYPES[tensor.dtype], _use(tensor))
        groups.setdefault(block_name(tensor.name), []).append(made)
    blocks = [BlockDescription(at, tuple(groups[at])) for at in sorted(groups, key=_order)]
    if known is not None:
        matched = _matched(blocks, known)
        if matched is not None:
            return replace(known, name=name, blocks=matched, source=f"{source} and its config.json")
    notes = ["order of calls and attention are guessed from names; keys and values of a cache aren't counted"]
    blocks, tied = _tied(blocks)
    if tied:
        notes.append(f"{tied[0][0]} is taken for the output's weights too: no tensor is named like a head")
    return ModelDescription(name, tuple(blocks), source, tied, tuple(notes))


def _use(tensor: StoredTensor) -> Use:
    if len(tensor.shape) < 2:
        return "elementwise"
    return "lookup" if len(tensor.shape) == 2 and _TABLE.search(tensor.name) else "product"


def _order(block: str) -> tuple[int, tuple[tuple[int, int | str], ...]]:
    """Tables first, the last norm and heads last, and in between by the numbers in the names."""
    numbered = bool(_DIGITS.search(block))
    place = 0 if _FIRST.search(block) else 1 if numbered else 3 if _LAST.search(block) else 1
    if place == 1 and not numbered and _NORM.search(block):
        place = 2
    parts = tuple((0, int(p)) if p.isdecimal() else (1, p) for p in _DIGITS.split(block[:200]) if p)
    return place, parts


def _tied(blocks: list[BlockDescription]) -> tuple[list[BlockDescription], tuple[tuple[str, ...], ...]]:
    """Without a head, the largest table is the output's weights as well."""
    tables = [
        (tensor.n_bytes, place)
        for place, block in enumerate(blocks)
        for tensor in block.tensors
        if tensor.use == "lookup" and len(block.tensors) == 1
    ]
    if not tables or any(re.search(r"head|embed_out|classifier|output\b", block.name) for block in blocks):
        return blocks, ()
    place = max(tables)[1]
    tensor = blocks[place].tensors[0]
    shared = BlockDescription(
        tensor.name,
        (replace(tensor, use="product"),),
        looked_up=True,
        operations=2,
        live_numbers=tensor.shape[0],
    )
    return [*blocks[:place], shared, *blocks[place + 1 :]], ((tensor.name,),)


def _matched(
    blocks: Sequence[BlockDescription], known: ModelDescription
) -> tuple[BlockDescription, ...] | None:
    """The config's blocks with the files' tensors, if every one of the files' is among them."""
    stored = {block.name: block for block in blocks}
    made = []
    for block in known.blocks:
        at = block.name if block.name in stored else block_name(block.name)
        found = stored.pop(at, None)
        if found is None or sum(t.numbers for t in found.tensors) != sum(t.numbers for t in block.tensors):
            return None
        dtype = max(found.tensors, key=lambda tensor: tensor.n_bytes).dtype
        made.append(replace(block, tensors=tuple(replace(tensor, dtype=dtype) for tensor in block.tensors)))
    return tuple(made) if not stored else None
