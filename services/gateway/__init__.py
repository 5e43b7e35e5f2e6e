"""Gateway: owns requests. HTTP and NATS front doors, auth, limits, chat template, tokens in order, stop strings, retry, cancel.

In:   HTTP (OpenAI API), ss.v1.generate and ss.v1.models (client request-reply), ss.v1.tokens.<gateway> (TokenBatch, Progress),
      ss.v1.session.<gateway>.{wanted,finish}, model cards in ss_config, leases in ss_workers
Out:  ss.v1.request.<class>.<model> (GenerateRequest), ss.v1.cancel, ss.v1.worker.<worker>.resend, ss.v1.event.usage.<gateway>
"""
