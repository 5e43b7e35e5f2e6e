"""The services of Slipstream. Each is one process (`python -m services.<name>`); none imports another."""
