"""Decode: loads the blocks it can get, computes the rest of the prompt itself, generates by continuous batching, writes blocks back.

In:   ss.v1.decode.<worker> (DecodeTask, work queue), ss.v1.cancel, ss.v1.worker.<worker>.{resend,snapshot,drain}
Out:  ss.v1.tokens.<gateway> (TokenBatch, Progress), ss.v1.session.<gateway>.{finish,wanted},
      ss.v1.kv.<host>.{acquire,release,reserve,commit}, ss.v1.event.kv.<worker>, ss.v1.event.load.<worker>; its ModelCard in ss_config
"""
