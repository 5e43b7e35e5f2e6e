"""Models: what a folder or GGUF file holds (torch-free), and the forward passes over it."""
