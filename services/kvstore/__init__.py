"""The KV store of one host: blocks in DRAM (the arena that workers map) and below, leases, eviction, transfer between hosts.

Subjects in: kv.<host>.{lookup, reserve, commit, acquire, release, prefetch, snapshot}.
Subjects out: event.kv.<host>, and kv.<other host>.prefetch before a push. Block bytes travel through
the arena and the socket of SS_KV_BIND.
"""
