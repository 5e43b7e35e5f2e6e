"""What prefill and decode workers share: intake of tasks, Progress, Finish, load reports, the device tier's events, the block chain."""
