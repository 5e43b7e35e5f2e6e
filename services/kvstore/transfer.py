"""Sending and taking blocks over a channel: offer → wanted → (head, payload) each → taken. The payload never leaves the arena's memory."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from services.kvstore.incoming import Incoming
from services.kvstore.peer import Channel
from services.kvstore.tiers.index import Block
from shared.errors import TransferFailed
from shared.kv import slot
from shared.messages.kv import BlockHead, BlockOffer, BlocksTaken, BlocksWanted


async def send_blocks(channel: Channel, memory: memoryview, blocks: Sequence[Block], *, handoff: bool) -> tuple[int, int]:
    """Offer blocks of one model and layout, which the caller holds, and send those wanted. Returns (blocks taken, bytes sent)."""
    first = blocks[0]
    offer = BlockOffer(
        first.model_digest,
        first.size_class.layout,
        first.size_class.block_bytes,
        b"".join(block.digest for block in blocks),
        b"".join(block.parent_digest for block in blocks),
        [block.tenant for block in blocks],
        handoff,
    )
    await channel.send(offer)
    wanted = await channel.receive(BlocksWanted)
    num_bytes = 0
    for index in wanted.indexes:
        if not 0 <= index < len(blocks):
            raise TransferFailed(channel.peer, f"block {index} of {len(blocks)} wanted")
        num_bytes += await _send_block(channel, memory, index, blocks[index])
    taken = await channel.receive(BlocksTaken) if wanted.indexes else BlocksTaken(0)
    return taken.num_blocks, num_bytes


async def _send_block(channel: Channel, memory: memoryview, index: int, block: Block) -> int:
    header = slot.read_header(memory, block.offset)
    token_ids = bytes(slot.tokens(memory, block.offset))
    await channel.send(BlockHead(index, header.format, header.length, header.checksum, token_ids))
    await channel.send_bytes(slot.payload(memory, block.offset, header.length))
    return header.length


async def take_blocks(channel: Channel, incoming: Incoming, offer: BlockOffer) -> tuple[int, int]:
    """Answer an offer: take what is missing and finds room. Returns (blocks taken, bytes received).

    A block whose payload fails its checksum is dropped, the rest goes on; a broken connection raises TransferFailed, and what was
    committed until then stays.
    """
    reserved = incoming.reserve(offer)
    num_taken = num_bytes = 0
    try:
        await channel.send(BlocksWanted(list(reserved)))
        for index in list(reserved):
            head = await channel.receive(BlockHead)
            if head.index != index or head.length > offer.block_bytes:
                raise TransferFailed(channel.peer, f"block {head.index} of {head.length} bytes, {index} was wanted")
            payload = incoming.payload(reserved[index], head.length)
            await channel.receive_into(payload)
            num_bytes += head.length
            num_taken += incoming.commit(reserved.pop(index), head, xxhash.xxh3_64_intdigest(payload), handoff=offer.handoff)
    finally:
        for block in reserved.values():
            incoming.abandon(block)
    if num_bytes:
        await channel.send(BlocksTaken(num_taken))
    return num_taken, num_bytes
