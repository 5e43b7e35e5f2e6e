"""Router: the one place where requests wait; decides where each is prefilled and decoded, and explains it; holds the index of who has what.

In:   ss.v1.request.<class>.<model> (GenerateRequest, work queue, one durable a class for all routers), ss.v1.cancel, ss.v1.event.kv.*,
      ss.v1.event.load.*, ss.v1.event.route.* (of the other routers), dead letters of prefill and decode
Out:  ss.v1.prefill.<worker>, ss.v1.decode.<worker>, ss.v1.tokens.<gateway> (Progress), ss.v1.session.<gateway>.{finish,wanted},
      ss.v1.event.route.<router>, ss.v1.kv.<host>.snapshot, ss.v1.worker.<worker>.snapshot,
      ss.v1.router.<router>.snapshot of the routers that were here before
Asked: ss.v1.router.<router>.snapshot (by routers), ss.v1.router.<router>.index (by people: empty for counts, {"cursor": 0} for all keys)
"""
