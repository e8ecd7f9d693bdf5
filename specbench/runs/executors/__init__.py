"""Executors: decode images in this process or in workers on one or many machines. Only the runner writes results."""
