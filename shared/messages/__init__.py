"""Typed, bounded messages: one file a topic. `codec` turns them into bytes, `subjects` says where they travel."""
