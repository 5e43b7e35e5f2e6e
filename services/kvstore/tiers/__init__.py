"""Where blocks lie: a list of tiers, fastest first. Adding one is one new file under the contract of `base.py`."""
