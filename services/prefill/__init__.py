"""Prefill: computes the KV blocks of a prompt that nobody has, chunk by chunk, and puts them into its host's KV store. It samples nothing.

In:   ss.v1.prefill.<worker> (PrefillTask, work queue), ss.v1.cancel, ss.v1.worker.<worker>.snapshot
Out:  ss.v1.decode.<worker> (DecodeTask), ss.v1.tokens.<gateway> (Progress), ss.v1.session.<gateway>.wanted,
      ss.v1.kv.<host>.{acquire,release,reserve,commit}, ss.v1.event.kv.<worker>, ss.v1.event.load.<worker>; its ModelCard in ss_config
"""
