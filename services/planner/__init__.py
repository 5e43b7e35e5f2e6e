"""Watches the fleet and says how many workers it wants. For now it observes and publishes; nobody acts on a plan yet.

In: ss.v1.event.load.<worker> (WorkerLoad), ss.v1.event.route.<router> (Route), ss.v1.event.usage.<gateway> (UsageRecord), the leases.
Out: ss.v1.plan (Plan), the same in bucket ss_config under `plan`, revision-checked.
"""
